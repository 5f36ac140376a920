"""Entry points -> backend specs, with every failure kept as a record instead of raised.

pluggy drops an entry point of a taken name in silence, accepts a misspelled hook until `check_pending`, and lets one
raising plugin end the call for all. Here each plugin gets a manager of its own, so that none of this crosses over.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import distributions

import pluggy
from packaging.utils import canonicalize_name

from hf_moe_backends import hookspecs
from hf_moe_backends._version import __version__
from hf_moe_backends.spec import STOCK_NAMES, BackendSpec

DISABLE_VARIABLE = "HF_MOE_BACKENDS_DISABLE"
HOOK = "hf_moe_backends_register"


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """One entry point and what came of it: its specs, or the error that kept it from giving any."""

    distribution: str
    version: str
    entry_point: str
    specs: tuple[BackendSpec, ...] = ()
    error: str | None = None

    @property
    def label(self) -> str:
        return f"{self.distribution} {self.version}"


def discover() -> tuple[Plugin, ...]:
    """The built-in backends, then every installed plugin in the order of distribution and entry-point names.

    Imports the plugins' own modules and nothing else: no kernel library, and not torch.
    """
    from hf_moe_backends import builtin

    disabled = {name.strip() for name in os.environ.get(DISABLE_VARIABLE, "").split(",") if name.strip()}
    found = [_read("hf-moe-backends", __version__, "builtin", lambda: builtin)]
    disabled_distributions = {canonicalize_name(name) for name in disabled}
    for distribution, version, entry_point, load in _entry_points():
        if entry_point in disabled or canonicalize_name(distribution) in disabled_distributions:
            error = f"left out by {DISABLE_VARIABLE}"
            found.append(Plugin(distribution=distribution, version=version, entry_point=entry_point, error=error))
        else:
            found.append(_read(distribution, version, entry_point, load))
    return tuple(found)


def _entry_points() -> list[tuple[str, str, str, Callable[[], object]]]:
    """This project's entry points: the distribution's name and version, the entry point's name, and what loads it.

    A distribution that is on the path twice counts once, as the first one: that is the one Python imports.
    """
    seen: set[str] = set()
    found: list[tuple[str, str, str, Callable[[], object]]] = []
    for distribution in distributions():
        try:
            name, version = distribution.metadata["Name"], distribution.version
        except Exception:  # what is left of a half-removed distribution
            continue
        if not name or canonicalize_name(name) in seen:
            continue
        seen.add(canonicalize_name(name))
        try:
            entry_points = distribution.entry_points.select(group=hookspecs.PROJECT)
        except Exception as exception:
            if hookspecs.PROJECT in (distribution.read_text("entry_points.txt") or ""):
                found.append((name, version, "entry_points.txt", partial(_raise, exception)))
            continue
        found.extend((name, version, entry_point.name, entry_point.load) for entry_point in entry_points)
    return sorted(found, key=lambda item: (item[0].lower(), item[2]))


def _raise(exception: Exception) -> object:
    raise exception


def _read(distribution: str, version: str, entry_point: str, load: Callable[[], object]) -> Plugin:
    specs: tuple[BackendSpec, ...] = ()
    error = None
    try:
        specs = _specs(load())
        taken = [f"{spec.kind}={spec.name}" for spec in specs if spec.name in STOCK_NAMES[spec.kind]]
        if taken and distribution != "hf-moe-backends":
            raise ValueError(f"it offers {', '.join(taken)}, a name reserved for Transformers' own code")
    except KeyboardInterrupt:
        raise
    except BaseException as exception:  # whatever a plugin raises, SystemExit included, is its own error
        specs = ()
        error = f"{type(exception).__name__}: {exception}"
    return Plugin(distribution=distribution, version=version, entry_point=entry_point, specs=specs, error=error)


def _specs(plugin: object) -> tuple[BackendSpec, ...]:
    """Call one plugin's hook and check what it returns.

    Raises:
        PluginValidationError: a hook with a wrong name or signature.
        TypeError: no hook, or one that returned something else than `BackendSpec`s.
    """
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(plugin)
    manager.check_pending()
    hook = manager.hook.hf_moe_backends_register
    if not hook.get_hookimpls():
        module = inspect.getmodule(plugin)
        where = module.__name__ if module else type(plugin).__name__
        raise TypeError(f"{where} has no function {HOOK} marked with hf_moe_backends.hookimpl")
    specs = []
    for returned in hook() or [None]:  # pluggy leaves None out of its results
        if isinstance(returned, (str, bytes)) or not isinstance(returned, Iterable):
            raise TypeError(f"{HOOK} must return BackendSpecs, got {returned!r}")
        for spec in returned:
            if not isinstance(spec, BackendSpec):
                raise TypeError(f"{HOOK} must return BackendSpecs, got {spec!r} among them")
            specs.append(spec)
    if len({(spec.kind, spec.name) for spec in specs}) < len(specs):
        raise ValueError(f"{HOOK} returned the same kind and name twice")
    return tuple(specs)
