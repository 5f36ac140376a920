"""`Plan`: the edits that a config means for one model, checked as a whole, applied as a whole, reverted as a whole."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_moe_backends.config import BackendConfig
from hf_moe_backends.edits import (
    ConfigCopies,
    DispatchLate,
    Edit,
    ReplaceModules,
    SetAttention,
    SetExperts,
    SetLoss,
    SwapDispatcher,
    has_closure_forward,
)
from hf_moe_backends.errors import MoeBackendError, PlanError
from hf_moe_backends.expert_parallel import sharded
from hf_moe_backends.registry import Registry
from hf_moe_backends.selection import Choice, select
from hf_moe_backends.spec import Kind
from hf_moe_backends.survey import Site, survey

MARK = "_hf_moe_backends_plan"
"""The attribute under which a model, and each Transformers model inside it, holds the plan in force.

An attribute, not a table beside the model: a deep copy or a pickle of the model then has its own plan.
"""

lock = threading.RLock()
"""Held while a model is edited."""


class Plan:
    """What `plan_moe_backend` returns. `print(plan)` explains it.

    Attributes:
        choices: one `Choice` a kind, with the trace of candidates.
        edits: what `apply` will do.
    """

    def __init__(self, model: nn.Module, config: BackendConfig, registry: Registry, device: str | None = None):
        self.model = host(model)
        _require_outermost(self.model)
        self.asked = config
        sites = survey(self.model)
        self.choices = select(config, sites, registry, current=_current(sites), device=device)
        self.edits = tuple(edit for choice in self.choices for edit in _edits(choice, self.model))
        self.configs: ConfigCopies | None = None
        for edit in self.edits:
            edit.check()
            edit.register()

    @property
    def in_force(self) -> bool:
        """Whether this plan is what the model runs on."""
        return vars(self.model).get(MARK) is self

    @property
    def config(self) -> BackendConfig:
        """The backends that this plan puts in place, by name: `"auto"` is resolved."""
        chosen = {choice.kind: choice.backend.spec.name for choice in self.choices if choice.backend is not None}
        options = {
            f"{kind}.{name}": self.asked.options[f"{kind}.{name}"]
            for kind, name in chosen.items()
            if f"{kind}.{name}" in self.asked.options
        }
        return BackendConfig(**chosen, options=options)

    def describe(self) -> dict[str, str]:
        """By kind what it puts in place, in words that are the same wherever the same is meant."""
        return {
            choice.kind: " ".join([choice.backend.spec.name, choice.backend.plugin.label, str(dict(choice.options))])
            for choice in self.choices
            if choice.backend is not None
        }

    def apply(self) -> None:
        """Make all edits, or none: an exception midway undoes what was done and is raised.

        A plan that is in force on the model gives way, and comes back if this one fails. Applying a plan that is in
        force does nothing.
        """
        with lock:
            if self.in_force:
                return
            replaced = plans(self.model)
            revert_all(replaced)
            try:
                self._apply()
            except BaseException:
                for plan in replaced:
                    plan.resume()
                raise

    def resume(self) -> None:
        """Back in force as `revert` found it, with what others had set in the place of this plan's own names."""
        with lock:
            self._apply()
            assert self.configs is not None
            self.configs.rewrite()

    def _apply(self) -> None:
        done: list[Edit] = []
        try:
            if self.configs is None:
                self.configs = ConfigCopies(self.model)
            self.configs.install(self.model)
            for edit in self.edits:
                done.append(edit)
                edit.apply(self.model, self.configs)
            for edit in self.edits:
                edit.verify()
        except BaseException as error:
            for edit in reversed(done):
                edit.revert(self.model)
            if self.configs is not None and self.configs.as_copied:
                self.configs.remove(self.model)
            if isinstance(error, MoeBackendError) or not isinstance(error, Exception):
                raise
            label = f"{done[-1].backend.spec.kind}={done[-1].backend.spec.name!r}" if done else "copying the config"
            raise PlanError(
                f"{label} failed on this model and every edit was undone: {type(error).__name__}: {error}"
            ) from error
        for model in _marked(self.model):
            vars(model)[MARK] = self

    def revert(self, root: nn.Module | None = None) -> None:
        """Restore the model: the same modules, forwards, config objects and parameters as before `apply`.

        Args:
            root: a module around the model, whose own reference to the model's config is restored too (peft keeps one).

        Raises:
            PlanError: the model was changed since in a way that cannot be undone. Nothing is reverted then.
        """
        with lock:
            if not self.in_force:
                return
            root = self.model if root is None else root
            for edit in self.edits:
                edit.check_revert(root)
            for edit in reversed(self.edits):
                edit.revert(root)
            assert self.configs is not None
            self.configs.remove(root)
            for model in _marked(self.model):
                vars(model).pop(MARK, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        import copy

        self._require_copyable("deep-copied")
        plan = Plan.__new__(Plan)
        memo[id(self)] = plan
        vars(plan).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return plan

    def __getstate__(self) -> dict[str, Any]:
        self._require_copyable("pickled")
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for edit in self.edits:  # another process does not know the names that the configs hold
            edit.register()

    def _require_copyable(self, how: str) -> None:
        if has_closure_forward(self.model.modules()):
            raise PlanError(
                f"this model cannot be {how}: a module's forward is a closure, as Transformers installs to shard "
                "experts over ranks, so that a copy would run the original's weights. Use save_pretrained, or copy "
                "before that."
            )

    def __str__(self) -> str:
        lines = [f"{type(self.model).__name__}: backends {'in force' if self.in_force else 'planned'}"]
        for choice in self.choices:
            lines.extend(_explain(choice, self.edits))
        return "\n".join(lines)


def host(model: nn.Module) -> nn.Module:
    """The model that holds the plan: the one Transformers model inside any wrappers, else `model` itself."""
    outermost = list(_outermost(model))
    return outermost[0] if len(outermost) == 1 else model


def plans(model: nn.Module) -> list[Plan]:
    """The plans in force anywhere inside `model`."""
    found: list[Plan] = []
    for module in model.modules():
        plan = vars(module).get(MARK)
        if isinstance(plan, Plan) and not any(plan is seen for seen in found):
            found.append(plan)
    return found


def revert_all(in_force: list[Plan], root: nn.Module | None = None) -> None:
    """Revert these plans, or none of them. `root` is for those of the model that it is around."""
    reverted: list[Plan] = []
    try:
        for plan in in_force:
            plan.revert(root if root is not None and plan.model is host(root) else None)
            reverted.append(plan)
    except BaseException:
        for plan in reverted:
            plan.resume()
        raise


def _outermost(model: nn.Module) -> Iterator[PreTrainedModel]:
    if isinstance(model, PreTrainedModel):
        yield model
    else:
        for child in model.children():
            yield from _outermost(child)


def _marked(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if m is model or isinstance(m, PreTrainedModel)]


def _require_outermost(model: nn.Module) -> None:
    plan = vars(model).get(MARK)
    if isinstance(plan, Plan) and plan.model is not model:
        raise PlanError(
            f"this {type(model).__name__} is part of a {type(plan.model).__name__} whose backends are set as a whole. "
            "Set or reset them on that model."
        )


def _current(sites: dict[Kind, tuple[Site, ...]]) -> dict[Kind, str | None]:
    current: dict[Kind, str | None] = {"linear": "torch", "norm": "torch", "loss": "torch"}
    for kind, attribute in (("experts", "_experts_implementation"), ("attn", "_attn_implementation")):
        names = {getattr(getattr(s.module, "config", None), attribute, None) for s in sites[kind]}  # type: ignore[index]
        current[kind] = names.pop() if len(names) == 1 else None  # type: ignore[index]
    if sites["dispatcher"]:
        now = sharded(sites["dispatcher"][0].module)
        current["dispatcher"] = None if now is None else now.stock_name
    return current


def _edits(choice: Choice, model: nn.Module) -> Iterator[Edit]:
    backend, options, sites = choice.backend, choice.options, choice.sites
    if backend is None:
        return
    if choice.kind == "experts":
        late = tuple(site for site in sites if "late_dispatch" in site.demand.features)
        if late:
            owners = tuple(_config_owner(model, site) for site in late)
            yield DispatchLate(backend, options, late, owners=owners)
        yield SetExperts(backend, options, sites)
    elif choice.kind == "attn":
        models = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
        held = {id(site.module) for site in sites}
        owning = tuple(m for m in models if any(id(child) in held for child in m.modules()))
        yield SetAttention(backend, options, sites, owners=owning)
    elif choice.is_stock and choice.kind != "dispatcher":
        return  # torch's own linear, norm and loss are what an unedited model has
    elif choice.kind in ("linear", "norm"):
        yield ReplaceModules(backend, options, sites)
    elif choice.kind == "loss":
        yield SetLoss(backend, options, sites)
    else:
        yield SwapDispatcher(backend, options, sites)


def _config_owner(model: nn.Module, site: Site) -> nn.Module:
    """The closest module around a site that has a config."""
    path = site.name.split(".")
    for end in range(len(path) - 1, -1, -1):
        module = model.get_submodule(".".join(path[:end]))
        if getattr(module, "config", None) is not None:
            return module
    raise PlanError(
        f"{site.name} is in no module with a config, so there is nothing it could read a backend's name from"
    )


def _explain(choice: Choice, edits: tuple[Edit, ...]) -> Iterator[str]:
    count = f"{len(choice.sites)} site{'s' * (len(choice.sites) != 1)}"
    if choice.backend is None:
        yield f"  {choice.kind}: {choice.note}" + (f" ({count})" if choice.sites else "")
    else:
        asked = " (auto)" if choice.asked == "auto" else ""
        yield f"  {choice.kind}: {choice.backend.spec.name}{asked} on {count}, from {choice.backend.plugin.label}"
        for edit in edits:
            if edit.backend is choice.backend:
                yield f"      through {edit.hook}"
        if choice.options:
            yield f"      options {', '.join(f'{k}={v!r}' for k, v in choice.options.items())}"
        for summary, number in Counter(site.demand.summary() for site in choice.sites).items():
            yield f"      {number} x {summary}"
    lost: dict[str, list[str]] = {}
    for candidate in choice.trace:
        if candidate.lost:
            lost.setdefault(candidate.lost, []).append(candidate.name)
    for reason, names in lost.items():
        yield f"      not {', '.join(names)}: {reason}"
