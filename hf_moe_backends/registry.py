"""Names -> backends: look-up, conflicts between distributions, and what keeps a backend from running here."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from hf_moe_backends.discovery import Plugin, discover
from hf_moe_backends.errors import BackendConflict, ConfigError, nearest
from hf_moe_backends.spec import CONTRACT, LOAD_TIME, BackendSpec, Kind, load_object


@dataclass(frozen=True)
class Backend:
    """A spec together with the plugin that offers it."""

    spec: BackendSpec
    plugin: Plugin

    def unavailable(self, *, probe: bool = False) -> str | None:
        """Why it cannot run on this machine as installed, or None.

        Metadata only, unless `probe` is set: then the backend's own probe runs, which may import its packages.
        """
        spec = self.spec
        if spec.contract != CONTRACT:
            newer = spec.contract > CONTRACT
            cure = "pip install -U hf-moe-backends" if newer else f"pip install -U {self.plugin.distribution}"
            return f"written for plugin contract {spec.contract}, this is contract {CONTRACT} -> {cure}"
        for requirement in spec.requires:
            reason = requirement.missing()
            if reason:
                return f"{reason} -> {spec.install}" if spec.install else reason
        if probe and spec.probe:
            try:
                reason = load_object(spec.probe)()
            except KeyboardInterrupt:
                raise
            except BaseException as exception:  # a probe that fails is an answer, too
                reason = f"its probe raised {type(exception).__name__}: {exception}"
            if reason:
                return str(reason)
        return None


class Registry:
    """All discovered backends.

    Args:
        plugins: what `discovery.discover` found.
    """

    def __init__(self, plugins: Sequence[Plugin]):
        self.plugins = tuple(plugins)
        self.backends = tuple(Backend(spec, plugin) for plugin in self.plugins for spec in plugin.specs)

    def of_kind(self, kind: Kind) -> tuple[Backend, ...]:
        """Backends of one kind, the highest priority first, then by name."""
        found = [backend for backend in self.backends if backend.spec.kind == kind]
        return tuple(sorted(found, key=lambda backend: (-backend.spec.priority, backend.spec.name)))

    def conflicting(self, kind: Kind, name: str) -> tuple[Backend, ...]:
        """All backends of this kind and name when more than one distribution offers them, else nothing."""
        found = tuple(b for b in self.backends if b.spec.kind == kind and b.spec.name == name)
        return found if len(found) > 1 else ()

    def get(self, kind: Kind, name: str) -> Backend:
        """The backend of that kind and name.

        Raises:
            ConfigError: no such backend; names the nearest match and every plugin that failed to load.
            BackendConflict: several distributions offer it.
        """
        conflict = self.conflicting(kind, name)
        if conflict:
            offers = " and ".join(backend.plugin.label for backend in conflict)
            first, last = conflict[0].plugin, conflict[-1].plugin
            leave_out = last.distribution if last.distribution != first.distribution else last.entry_point
            raise BackendConflict(
                f"{kind}={name!r} is offered by {offers}. Uninstall one of them, or leave one out with "
                f"HF_MOE_BACKENDS_DISABLE={leave_out}"
            )
        for backend in self.backends:
            if backend.spec.kind == kind and backend.spec.name == name:
                return backend
        if (kind, name) in LOAD_TIME:
            raise ConfigError(
                f"{kind}={name!r} is chosen while a checkpoint is loaded and cannot be set on a model that exists: "
                f"{LOAD_TIME[kind, name]}"
            )
        message = f"{kind}={name!r} is not a known backend: {nearest(name, {b.spec.name for b in self.of_kind(kind)})}"
        elsewhere = sorted({b.spec.kind for b in self.backends if b.spec.name == name})
        if elsewhere:
            message += f". {name!r} is a backend of {', '.join(elsewhere)}"
        hint = KNOWN_PLUGINS.get((kind, name))
        if hint and all(plugin.distribution != hint for plugin in self.plugins):
            message += f"\n  {kind}={name!r} comes with a plugin -> pip install {hint}"
        for plugin in self.plugins:
            if plugin.error:
                message += f"\n  {plugin.label} offers nothing: {plugin.error}"
        raise ConfigError(message)


KNOWN_PLUGINS: dict[tuple[Kind, str], str] = {
    ("attn", "te"): "hf-moe-backends-te",
    ("linear", "te"): "hf-moe-backends-te",
    ("norm", "te"): "hf-moe-backends-te",
    ("experts", "te"): "hf-moe-backends-te",
    ("dispatcher", "deepep"): "hf-moe-backends-deepep",
    ("experts", "grouped_gemm"): "hf-moe-backends-grouped-gemm",
    ("norm", "liger"): "hf-moe-backends-liger",
    ("loss", "liger"): "hf-moe-backends-liger",
    ("experts", "sonic"): "hf-moe-backends-sonic",
}
"""Where the project's own plugins live, for the listing and the error about a name that is not installed."""

_lock = threading.Lock()
_registry: Registry | None = None


def registry(*, refresh: bool = False) -> Registry:
    """The registry of this process. Discovery runs once; `refresh` runs it again, after an install for example."""
    global _registry
    with _lock:
        if _registry is None or refresh:
            _registry = Registry(discover())
        return _registry
