"""Config + sites + registry -> one choice a kind, with a trace of every candidate and why it lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hf_moe_backends.config import BackendConfig
from hf_moe_backends.errors import BackendUnavailable, ConfigError, NoSite
from hf_moe_backends.registry import Backend, Registry
from hf_moe_backends.spec import FEATURES, KINDS, STOCK_NAMES, Kind
from hf_moe_backends.survey import ExpertsDemand, LossDemand, Site


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One backend that was looked at, and why it was not taken. None: it was taken."""

    name: str
    plugin: str
    lost: str | None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What becomes of one kind.

    `backend` is None where the kind stays as the model has it; `note` then says why. `sites` are those it will serve,
    `options` all of its options with their values.
    """

    kind: Kind
    asked: str | None
    backend: Backend | None
    sites: tuple[Site, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    trace: tuple[Candidate, ...] = ()
    note: str = ""

    @property
    def is_stock(self) -> bool:
        return self.backend is not None and self.backend.spec.name in STOCK_NAMES[self.kind]


def select(
    config: BackendConfig,
    sites: Mapping[Kind, tuple[Site, ...]],
    registry: Registry,
    *,
    current: Mapping[Kind, str | None],
    device: str | None = None,
) -> tuple[Choice, ...]:
    """One choice a kind, in the order of `KINDS`.

    Args:
        current: what the model runs each kind on as it stands. `"auto"` keeps it unless a backend of higher priority
            can serve every site: it never swaps one stock implementation for another.
        device: the device to plan for where a site's own is undecided (the meta device).

    Raises:
        ConfigError: an unknown name or option.
        BackendConflict: a name that two distributions offer.
        NoSite: a named backend whose kind has no site in this model.
        BackendUnavailable: a named backend that cannot run this model on this machine.
    """
    dispatcher = _choose("dispatcher", config, sites["dispatcher"], registry, current.get("dispatcher"), device)
    if dispatcher.backend is not None:
        sites = {**sites, "experts": _handed(sites["experts"], dispatcher)}
    choices = {
        kind: _choose(kind, config, sites[kind], registry, current.get(kind), device)
        for kind in KINDS
        if kind != "dispatcher"
    }
    _check_experts(dispatcher, choices["experts"], sites["experts"], registry, current.get("experts"), device)
    return tuple(dispatcher if kind == "dispatcher" else choices[kind] for kind in KINDS)


def _handed(sites: tuple[Site, ...], dispatcher: Choice) -> tuple[Site, ...]:
    """Experts as they are behind this dispatcher: what it hands them is what they must take."""
    assert dispatcher.backend is not None
    served = {id(site.module) for site in dispatcher.sites}
    # ids of -1 become sentinels for who does not declare them
    demanded = frozenset({"sentinels"}) if dispatcher.backend.spec.hands else frozenset()
    return tuple(
        replace(site, demand=replace(site.demand, features=site.demand.features - {"sentinels"} | demanded))
        if id(site.module) in served
        else site
        for site in sites
    )


def _check_experts(
    dispatcher: Choice,
    experts: Choice,
    sites: tuple[Site, ...],
    registry: Registry,
    current: str | None,
    device: str | None,
) -> None:
    """The experts backend that stays must take what a new dispatcher hands it.

    Raises:
        BackendUnavailable: it does not.
    """
    if dispatcher.backend is None or experts.backend is not None or current is None:
        return
    stays = [backend for backend in registry.of_kind("experts") if backend.spec.name == current]
    reason = refusal(stays[0], sites, device) if len(stays) == 1 else None
    if reason:
        name = dispatcher.backend.spec.name
        raise BackendUnavailable(
            f"dispatcher={name!r} cannot serve the experts backend that this model runs on.\n"
            f"  {current}: {reason}\n"
            f"  Set one that can with it: BackendConfig(dispatcher={name!r}, experts='torch_mm')"
        )


def check_names(config: BackendConfig, registry: Registry) -> None:
    """Raise for a name or an option that does not exist, as `select` would. This needs no model.

    Raises:
        ConfigError: an unknown name or option.
        BackendConflict: a name that two distributions offer.
    """
    for kind in KINDS:
        asked = config.get(kind)
        if asked not in (None, "auto"):
            registry.get(kind, asked)
        for key, values in config.options.items():
            if key.startswith(f"{kind}."):
                _options(registry.get(kind, key.partition(".")[2]), values)


def _choose(
    kind: Kind,
    config: BackendConfig,
    sites: tuple[Site, ...],
    registry: Registry,
    current: str | None,
    device: str | None,
) -> Choice:
    asked = config.get(kind)
    if asked is None:
        return Choice(kind=kind, asked=None, backend=None, note="not asked for")
    if asked == "auto":
        return _best(kind, config, sites, registry, current, device)

    backend = registry.get(kind, asked)
    options = _options(backend, config.options.get(f"{kind}.{asked}", {}))
    if not sites:
        raise NoSite(_no_site(kind, asked))
    reason = refusal(backend, sites, device)
    if reason:
        usable = [
            b.spec.name
            for b in registry.of_kind(kind)
            if b is not backend and not registry.conflicting(kind, b.spec.name) and refusal(b, sites, device) is None
        ]
        raise BackendUnavailable(
            f"{kind}={asked!r} cannot run this model on this machine.\n"
            f"  {asked} ({backend.plugin.label}): {reason}\n"
            f"  usable here: {', '.join(usable) or 'none'}"
        )
    trace = (Candidate(name=asked, plugin=backend.plugin.label, lost=None),)
    return Choice(kind=kind, asked=asked, backend=backend, sites=sites, options=options, trace=trace)


def _best(
    kind: Kind,
    config: BackendConfig,
    sites: tuple[Site, ...],
    registry: Registry,
    current: str | None,
    device: str | None,
) -> Choice:
    if not sites:
        return Choice(kind=kind, asked="auto", backend=None, note=f"this model has no site of kind {kind}")
    trace = []
    chosen: Backend | None = None
    for backend in registry.of_kind(kind):
        name = backend.spec.name
        if registry.conflicting(kind, name):
            lost: str | None = "offered by more than one distribution"
        elif name in STOCK_NAMES[kind]:
            lost = None if name == current else "stock; auto does not swap one stock implementation for another"
        else:
            lost = refusal(backend, sites, device)
            if lost is None and backend.spec.priority <= 0:
                lost = f"priority {backend.spec.priority} is not above stock code's 0"
        if lost is None and chosen is not None:
            lost = f"priority {backend.spec.priority} is not above {chosen.spec.name}'s {chosen.spec.priority}"
        if lost is None:
            chosen = backend
        trace.append(Candidate(name=name, plugin=backend.plugin.label, lost=lost))
    for key in config.options:
        if key.startswith(f"{kind}."):  # checked for every backend they are given for, chosen or not
            _options(registry.get(kind, key.partition(".")[2]), config.options[key])
    if chosen is None or chosen.spec.name in STOCK_NAMES[kind]:
        note = f"stays on {current}" if current else "stays as it is"
        blocked = next((site.demand.blocked for site in sites if site.demand.blocked), None)
        if blocked:
            note += f": {blocked}"
        return Choice(kind=kind, asked="auto", backend=None, sites=sites, trace=tuple(trace), note=note)
    options = _options(chosen, config.options.get(f"{kind}.{chosen.spec.name}", {}))
    return Choice(kind=kind, asked="auto", backend=chosen, sites=sites, options=options, trace=tuple(trace))


def refusal(backend: Backend, sites: Sequence[Site], device: str | None = None) -> str | None:
    """Why `backend` cannot serve all of these sites on this machine, or None."""
    reason = backend.unavailable(probe=True)
    if reason:
        return reason
    reasons: dict[str, list[str]] = {}
    for site in sites:
        reason = _demand_refusal(backend, site, device)
        if reason:
            reasons.setdefault(reason, []).append(site.name or "the model itself")
    if not reasons:
        return None
    parts = []
    for reason, names in reasons.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        parts.append(f"{reason} (at {names[0]}{more})")
    return "; ".join(parts)


def _demand_refusal(backend: Backend, site: Site, device: str | None) -> str | None:
    spec, demand = backend.spec, site.demand
    can = spec.capabilities
    stock = spec.name in STOCK_NAMES[spec.kind]
    if demand.blocked and not (stock and spec.kind in ("linear", "norm")):  # torch's own is what is there
        return demand.blocked
    where = device if demand.device == "meta" and device else demand.device
    if where != "meta" and where not in can.devices:
        return f"runs on {', '.join(sorted(can.devices))}, not on {where}"
    if where == "cuda" and can.min_sm is not None and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        if 10 * major + minor < can.min_sm:
            return f"needs compute capability {can.min_sm / 10:.1f}, this GPU has {major}.{minor}"
    if demand.dtype is not None and demand.dtype not in can.dtypes:
        return f"computes in {', '.join(sorted(can.dtypes))}, not in {demand.dtype}"
    missing = sorted(demand.features - can.features)
    if missing:
        return f"does not support {'; '.join(FEATURES[spec.kind][feature] for feature in missing)}"
    if isinstance(demand, ExpertsDemand) and can.gates is not None and demand.gate.formula not in can.gates:
        return f"fuses the gates {', '.join(sorted(can.gates))}, not {demand.gate}"
    if isinstance(demand, LossDemand) and can.fuses_head and demand.cannot_fuse:
        return demand.cannot_fuse
    for name, size in demand.sizes.items():
        if size % can.alignment:
            return f"needs sizes that are multiples of {can.alignment}, {name} is {size}"
    if demand.training and not can.training:
        return "has no backward pass, and this model is in training mode: model.eval() first"
    return None


def _options(backend: Backend, given: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return backend.spec.resolve_options(given)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _no_site(kind: Kind, asked: str) -> str:
    message = f"{kind}={asked!r} has nothing to replace: this model has no site of kind {kind}."
    if kind == "dispatcher":
        message = (
            f"dispatcher={asked!r} has nothing to dispatch: this model's experts are not sharded over ranks.\n"
            "  Load it under torchrun with DistributedConfig(fsdp_size=N, ep_size=N), "
            "from_pretrained(path, distributed_config=...), then set the dispatcher."
        )
    elif kind == "experts":
        message += " It is a dense model, or its experts are none that this package knows."
    return message
