"""What `hf-moe-backends list` shows: every backend, whether it can run on this machine, and what would help."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from hf_moe_backends.discovery import DISABLE_VARIABLE
from hf_moe_backends.registry import KNOWN_PLUGINS, Backend, Registry
from hf_moe_backends.spec import KINDS, STOCK_NAMES, Kind

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = 1
"""The version of `as_json`'s form. It grows when a field changes its meaning or goes; new fields may come without."""

State = Literal["ready", "unknown", "unavailable", "conflict", "missing"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One backend on this machine.

    `state` is `ready`; `unknown`, where only a device can tell and it was not asked; `unavailable`; `conflict`, where
    several distributions offer this kind and name; or `missing`, where the distribution is known and not installed.
    `reason` says why it is not ready, `helps` the command that would help; both are empty where there is nothing to
    say. `stock` is Transformers' or torch's own code.
    """

    kind: Kind
    name: str
    distribution: str
    version: str | None
    stock: bool
    priority: int | None
    state: State
    reason: str = ""
    helps: str = ""


def rows(registry: Registry, *, probe: bool = False) -> list[Row]:
    """All backends: by kind in the order of `KINDS`, then by priority, then by name; those not installed come last.

    Args:
        probe: ask the device and run the backends' own probes. Imports torch and may import kernel libraries; without
            it neither torch nor Transformers is imported.
    """
    devices = _devices() if probe else None
    found: list[Row] = []
    for kind in KINDS:
        for backend in registry.of_kind(kind):
            state, reason, helps = _state(backend, registry, devices)
            found.append(
                Row(
                    kind=kind,
                    name=backend.spec.name,
                    distribution=backend.plugin.distribution,
                    version=backend.plugin.version,
                    stock=backend.spec.name in STOCK_NAMES[kind],
                    priority=backend.spec.priority,
                    state=state,
                    reason=reason,
                    helps=helps,
                )
            )
        installed = {plugin.distribution for plugin in registry.plugins}
        found.extend(
            Row(
                kind=kind,
                name=name,
                distribution=distribution,
                version=None,
                stock=False,
                priority=None,
                state="missing",
                reason=f"comes with {distribution}, not installed",
                helps=f"pip install {distribution}",
            )
            for (of_kind, name), distribution in KNOWN_PLUGINS.items()
            if of_kind == kind and distribution not in installed
        )
    return found


def _state(backend: Backend, registry: Registry, devices: frozenset[str] | None) -> tuple[State, str, str]:
    """State, reason and what helps. `devices` are the device types here, None where they were not asked for."""
    spec, plugin = backend.spec, backend.plugin
    others = [b.plugin for b in registry.conflicting(spec.kind, spec.name) if b is not backend]
    if others:
        # a plugin is left out by its distribution's name, or by its entry point's where both are in one distribution
        leave_out = ",".join(
            sorted({o.distribution if o.distribution != plugin.distribution else o.entry_point for o in others})
        )
        return "conflict", f"also offered by {' and '.join(o.label for o in others)}", f"{DISABLE_VARIABLE}={leave_out}"
    message = backend.unavailable(probe=devices is not None)
    if message:
        reason, _, helps = message.partition(" -> ")  # how `unavailable` joins a reason and its cure
        return "unavailable", reason, helps
    needs = _needs(backend)
    if devices is None:
        if needs or spec.probe:
            return "unknown", needs or "its own probe tells", "hf-moe-backends list --probe"
    elif not devices & spec.capabilities.devices:
        return "unavailable", f"needs {needs}; this machine has {', '.join(sorted(devices))}", ""
    elif "cuda" in devices and (found := _compute_capability()) < (spec.capabilities.min_sm or 0):
        return "unavailable", f"needs {needs}; this GPU has {found / 10:.1f}", ""
    return "ready", "", ""


def _needs(backend: Backend) -> str:
    """What a backend needs of a device in words, nothing where a CPU will do."""
    can = backend.spec.capabilities
    if "cpu" in can.devices:
        return ""
    least = f" of compute capability {can.min_sm / 10:.1f} or higher" if can.min_sm else ""
    return " or ".join(sorted(can.devices)) + least


def _devices() -> frozenset[str]:
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return frozenset({"cpu"} | ({accelerator.type} if accelerator else set()))


def _compute_capability() -> int:
    import torch

    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def as_json(registry: Registry, found: Sequence[Row], *, probe: bool) -> dict[str, Any]:
    """The form of `list --json`.

    `{"schema": 1, "probed": bool, "backends": [Row as an object, ...], "plugins": [{"distribution", "version",
    "entry_point", "error"}, ...]}`. A plugin's `error` is why it offers nothing, or null.
    """
    return {
        "schema": SCHEMA,
        "probed": probe,
        "backends": [asdict(row) for row in found],
        "plugins": [
            {
                "distribution": plugin.distribution,
                "version": plugin.version,
                "entry_point": plugin.entry_point,
                "error": plugin.error,
            }
            for plugin in registry.plugins
        ],
    }


def tables(registry: Registry, found: Sequence[Row]) -> list[RenderableType]:
    """The tables of `list`: installed backends by kind, known plugins to install, plugins that offer nothing."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    def table(*columns: str) -> Table:
        made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in columns:
            made.add_column(column, overflow="fold")
        return made

    # cells are Text, because a reason with brackets in it is no markup
    backends = table("kind", "backend", "from", "here", "what helps")
    shown: Kind | None = None
    for names, row in _folded(row for row in found if row.state != "missing"):
        if shown is not None and row.kind != shown:
            backends.add_section()
        here = row.state if not row.reason else f"{row.state}: {row.reason}"
        style = {"ready": "green", "unknown": "yellow"}.get(row.state, "red")
        kind = row.kind if row.kind != shown else ""
        backends.add_row(kind, Text(", ".join(names)), Text(_source(row)), Text(here, style=style), Text(row.helps))
        shown = row.kind
    made: list[RenderableType] = [backends]

    offers: dict[str, list[Row]] = {}
    for row in found:
        if row.state == "missing":
            offers.setdefault(row.distribution, []).append(row)
    if offers:
        missing = table("not installed", "offers", "what helps")
        for distribution, offered in offers.items():
            names = [f"{row.kind}={row.name}" for row in offered]
            missing.add_row(Text(distribution), Text(", ".join(names)), Text(offered[0].helps))
        made.append(missing)

    broken = [plugin for plugin in registry.plugins if plugin.error]
    if broken:
        errors = table("plugin", "entry point", "offers nothing because")
        for plugin in broken:
            errors.add_row(Text(plugin.label), Text(plugin.entry_point), Text(plugin.error or "", style="red"))
        made.append(errors)
    return made


def _folded(found: Iterable[Row]) -> list[tuple[list[str], Row]]:
    """Stock rows that differ in nothing but the name become one: Transformers' own names would fill the screen."""
    folded: dict[tuple[object, ...], tuple[list[str], Row]] = {}
    for row in found:
        single = () if row.stock else (row.name, row.distribution)
        key = (row.kind, row.state, row.reason, row.helps, *single)
        folded.setdefault(key, ([], row))[0].append(row.name)
    return list(folded.values())


def _source(row: Row) -> str:
    """The distribution whose code runs, which for stock names is not the one that offers them."""
    if not row.stock:
        return f"{row.distribution} {row.version}"
    origin = "torch" if "torch" in STOCK_NAMES[row.kind] else "transformers"
    try:
        return f"{origin} {importlib.metadata.version(origin)}"
    except importlib.metadata.PackageNotFoundError:
        return origin
