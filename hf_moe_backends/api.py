"""The calls a user makes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn

from hf_moe_backends.agreement import expert_group, on_all
from hf_moe_backends.config import BackendConfig
from hf_moe_backends.errors import ConfigError, RanksDisagree
from hf_moe_backends.loading import take_sizes
from hf_moe_backends.plan import MARK, Plan, host, lock, plans, revert_all
from hf_moe_backends.registry import registry
from hf_moe_backends.selection import check_names
from hf_moe_backends.spec import Kind


def plan_moe_backend(model: nn.Module, config: BackendConfig, *, device: str | None = None) -> Plan:
    """What `config` means for `model`, without changing it. `print()` the plan to read it.

    Args:
        model: a Transformers model, or anything around one: peft, DDP, FSDP, `torch.compile`.
        device: the device type to plan for when the model is on the meta device. Default: cuda where there is one.

    Raises:
        MoeBackendError: the config cannot be applied to this model on this machine, and why.
    """
    _require_config("config", config)
    _require_module(model)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    with lock, _as_stock(host(model)):
        return Plan(model, config, registry(), device)


def set_moe_backend(model: nn.Module, config: BackendConfig) -> Plan:
    """Put the backends of `config` in place of what `model` runs on. Returns the applied plan.

    The config is the whole state: it replaces the one set before. To change one kind:
    `set_moe_backend(model, dataclasses.replace(get_moe_backend(model), experts="loop"))`.

    Where Transformers has sharded the model's experts over ranks, all of these must call it, as a collective: they
    change their models to the same, or none does.

    Raises:
        MoeBackendError: the config cannot be applied. The model is as it was.
        RanksDisagree: it cannot on another rank, or that one has another config.
    """
    _require_module(model)
    with lock:
        group = expert_group(model)
        if group is None:
            plan = plan_moe_backend(model, config)
            plan.apply()
            return plan
        plan = on_all(group, lambda: plan_moe_backend(model, config), Plan.describe)
        before = plans(host(model))
        try:
            on_all(group, plan.apply, lambda _: {})
        except RanksDisagree:
            _back_to(before, model)
            raise
    return plan


def reset_moe_backend(model: nn.Module) -> None:
    """Back to stock: the modules, forwards, config objects and parameters that the model had. No-op on a stock model.

    Raises:
        PlanError: the model was sharded, hooked or copied in part after its modules were replaced. Nothing is reset.
    """
    _require_module(model)
    with lock:
        revert_all(plans(model), model)


def get_moe_backend(model: nn.Module) -> BackendConfig:
    """The backends in force, by name. Kinds that run stock code as loaded are None.

    What was changed since behind this package's back, through `model.set_experts_implementation` for instance, is
    reported as it is now.
    """
    _require_module(model)
    plan = vars(host(model)).get(MARK)
    if not isinstance(plan, Plan):
        return BackendConfig()
    config = plan.config
    for kind, attribute in (("experts", "_experts_implementation"), ("attn", "_attn_implementation")):
        choice = next(c for c in plan.choices if c.kind == kind)
        if choice.backend is None:
            continue
        edit = next(e for e in plan.edits if e.backend is choice.backend)
        now = getattr(getattr(choice.sites[0].module, "config", None), attribute, None)
        if now != edit.key:
            kept = {k: v for k, v in config.options.items() if not k.startswith(f"{kind}.")}
            config = BackendConfig.from_dict(config.to_dict() | {kind: now, "options": kept})
    return config


@contextmanager
def moe_backend(model: nn.Module, config: BackendConfig) -> Iterator[Plan]:
    """`set_moe_backend` for the time of a `with` block; what was in force on entry comes back on exit."""
    _require_module(model)
    with lock:
        before = plans(host(model))
        plan = set_moe_backend(model, config)
    try:
        yield plan
    finally:
        with lock:
            _back_to(before, model)


def _back_to(before: list[Plan], model: nn.Module) -> None:
    reset_moe_backend(model)
    for earlier in before:
        earlier.resume()


@contextmanager
def _as_stock(model: nn.Module) -> Iterator[None]:
    """The model as it is without any plan, so that another plan can be made for it."""
    inside = set(model.modules())
    in_force = [plan for plan in plans(model) if plan.model in inside]
    revert_all(in_force)
    try:
        yield
    finally:
        for plan in in_force:
            plan.resume()


class AutoModelForCausalLM(transformers.AutoModelForCausalLM):  # type: ignore[misc]
    """Transformers' class, with one more argument: `backend`.

    `from_pretrained` and `from_config` return the stock model with its plan applied. `backend` defaults to
    `BackendConfig.auto()`, which leaves alone what `attn_implementation` or `experts_implementation` say explicitly.

    `from_pretrained` also takes `ep_size`, `fsdp_size` and `tp_size`, for a model that is sharded over the ranks that
    torchrun has started, each of which reads only its shard: experts over `ep_size` ranks, everything over `fsdp_size`
    ranks with a batch each, and `tp_size` ranks to a batch. See `hf_moe_backends.loading.distributed_config`.
    """

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, backend: BackendConfig | None = None, **kwargs: Any
    ) -> Any:
        backend = _beside_stock_arguments(backend, kwargs)
        take_sizes(kwargs)
        model = transformers.AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        set_moe_backend(model[0] if isinstance(model, tuple) else model, backend)
        return model

    @classmethod
    def from_config(cls, config: Any, backend: BackendConfig | None = None, **kwargs: Any) -> Any:
        backend = _beside_stock_arguments(backend, kwargs)
        # Transformers does not copy it, so that two models built from one config share it
        model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), **kwargs)
        set_moe_backend(model, backend)
        return model


def _beside_stock_arguments(backend: BackendConfig | None, kwargs: dict[str, Any]) -> BackendConfig:
    """The config to apply, where Transformers' own arguments for the same thing may be given as well.

    What can be checked without a model is checked here: loading one takes its time.
    """
    backend = BackendConfig.auto() if backend is None else backend
    _require_config("backend", backend)
    check_names(backend, registry())
    arguments: dict[Kind, str] = {"attn": "attn_implementation", "experts": "experts_implementation"}
    for kind, argument in arguments.items():
        asked = backend.get(kind)
        if kwargs.get(argument) is None or asked is None:
            continue
        if asked != "auto":
            raise ConfigError(
                f"{argument}={kwargs[argument]!r} and backend {kind}={asked!r} both say what {kind} runs on; "
                "give one of them"
            )
        backend = BackendConfig.from_dict(backend.to_dict() | {kind: None})
    return backend


def _require_config(name: str, config: object) -> None:
    if not isinstance(config, BackendConfig):
        raise ConfigError(f"{name} must be a BackendConfig, got {config!r}; BackendConfig.from_dict takes a mapping")


def _require_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch module, got {type(model).__name__}")
