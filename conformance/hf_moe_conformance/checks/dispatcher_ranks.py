"""What each rank runs in the checks of dispatchers: sharded models, loaded and set as a user does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hf_moe_backends import BackendConfig, MoeBackendError, RanksDisagree, set_moe_backend
from hf_moe_conformance import zoo
from hf_moe_conformance.cases import ExpertsInputs
from hf_moe_conformance.checks.experts_bench import Tensors, run_module
from hf_moe_conformance.ranks import rejoin

EXPERTS = "grouped_mm"
"""What the dispatchers dispatch to: Transformers' default, and the only one that is right under EP in all versions."""

PLANTED = "planted by the conformance suite"


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """A checkpoint, how it is sharded, and the dispatcher to set on it.

    Attributes:
        model_class: of Transformers.
        sizes: of `DistributedConfig`.
        batches: how many different batches the ranks have, which is what gradients are averaged over.
    """

    path: str
    model_class: str
    dtype: torch.dtype
    sizes: Mapping[str, int | bool]
    batches: int
    backend: Mapping[str, Any]
    training: bool


@dataclass(frozen=True)
class Refused:
    """The dispatcher said no when it was set.

    Attributes:
        meant: a refusal in the words of this package, or by a ValueError or NotImplementedError of the dispatcher's
            constructor. Anything else that goes wrong there is no refusal.
    """

    message: str
    meant: bool


@dataclass
class _Loaded:
    """The model of the scene before, which the next one often wants again."""

    sharded: Sharded | None = None
    model: Any = None
    refusal: Refused | None = None


_loaded = _Loaded()


def load(sharded: Sharded) -> Any:
    """The sharded model on its stock dispatcher."""
    from transformers.distributed import DistributedConfig

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = getattr(transformers, sharded.model_class).from_pretrained(
        sharded.path,
        distributed_config=DistributedConfig(**sharded.sizes),
        dtype=sharded.dtype,
        experts_implementation=EXPERTS,
    )
    return model.train(sharded.training)


def put_in_place(model: nn.Module, sharded: Sharded) -> Refused | None:
    """Set the dispatcher. Refused by one rank it is refused by all, or the others would wait for that one."""
    refused = None
    try:
        set_moe_backend(model, BackendConfig.from_dict(sharded.backend))
    except MoeBackendError as refusal:
        cause = refusal.__cause__
        meant = cause is None or isinstance(cause, (MoeBackendError, ValueError, NotImplementedError))
        meant = meant and not isinstance(refusal, RanksDisagree)  # a rank went another way than the others
        refused = Refused(str(refusal), meant)
    everybody: list[Refused | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, refused)
    said = {rank: one for rank, one in enumerate(everybody) if one is not None}
    if said and len(said) < len(everybody):
        first = next(iter(said.values()))
        return Refused(f"by rank {', '.join(map(str, said))} only: {first.message}", meant=False)
    return next((one for one in said.values() if not one.meant), refused)


def on_model(scene: Callable[..., Any]) -> Callable[..., Any]:
    """Give the scene a model with the dispatcher in place, or return the refusal."""

    @functools.wraps(scene)
    def run(sharded: Sharded, *arguments: Any) -> Any:
        if _loaded.sharded != sharded:
            forget()
            _loaded.model = load(sharded)
            _loaded.refusal = put_in_place(_loaded.model, sharded)
            _loaded.sharded = sharded
        return _loaded.refusal or scene(_loaded.model, sharded, *arguments)

    return run


def forget() -> None:
    """Drop the model and the process groups that it made."""
    _loaded.sharded = _loaded.model = _loaded.refusal = None
    rejoin()


@on_model
def placed(model: Any, sharded: Sharded) -> None:
    """The dispatcher is in place."""


@on_model
def modules(model: Any, sharded: Sharded, cases: Sequence[ExpertsInputs], how: str) -> list[Tensors]:
    """What this rank's part of the experts returns for its inputs of each case.

    Args:
        how: `forward`, `backward`, or `checkpoint` for a backward that runs the forward again.
    """
    call = _checkpointed if how == "checkpoint" else None
    return [_run(experts(model), sharded, inputs, backward=how != "forward", call=call) for inputs in cases]


def experts(model: nn.Module) -> Any:
    return zoo.experts_modules(model)[0]


def _checkpointed(module: nn.Module, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    y: Tensor = checkpoint(module, x, ids, shares, use_reentrant=False)
    return y


def _run(module: Any, sharded: Sharded, inputs: ExpertsInputs, *, backward: bool, call: Any = None) -> Tensors:
    found = run_module(module, inputs, _device(), backward=backward, call=call)
    return {name: _on_cpu(t) for name, t in _whole(found, sharded).items()}


def _device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def _whole(gradients: Mapping[str, Tensor | None], sharded: Sharded) -> Tensors:
    """Sharded gradients put together, and the average over batches made a sum.

    Raises:
        RuntimeError: a gradient is there on some ranks only. Putting it together would hang, as would a norm over it.
    """
    names = sorted(gradients)
    has = torch.tensor([gradients[name] is not None for name in names], device=_device())
    everybody = [torch.empty_like(has) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, has)
    found: Tensors = {}
    for name, on_rank in zip(names, torch.stack(everybody).T.tolist(), strict=True):
        gradient = gradients[name]
        if name not in ("y", "dX", "d_router") and any(on_rank) and not all(on_rank):
            without = [rank for rank, there in enumerate(on_rank) if not there]
            raise RuntimeError(
                f"{name} has no gradient on rank {without} and has one on the others: the norm of a sharded gradient "
                "would hang"
            )
        if name in ("y", "dX", "d_router") or gradient is None:
            found[name] = gradient
        else:
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            found[name] = whole * sharded.batches
    return found


def _on_cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().cpu()


def two_models(
    one: Sharded, other: Sharded, inputs: ExpertsInputs, other_inputs: ExpertsInputs
) -> Refused | tuple[Tensors, Tensors]:
    """The other model runs between the forward and the backward of the first, as a teacher or a critic does."""
    forget()
    found: list[Any] = [load(one), load(other)]
    for model, sharded in zip(found, (one, other), strict=True):
        refusal = put_in_place(model, sharded)
        if refusal:
            return refusal
    results: list[Tensors] = []

    def between(module: nn.Module, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        y: Tensor = module(x, ids, shares)
        results.append(_run(experts(found[1]), other, other_inputs, backward=True))
        return y

    first = _run(experts(found[0]), one, inputs, backward=True, call=between)
    return first, results[0]


@on_model
def whole_model(model: Any, sharded: Sharded, inputs: dict[str, Tensor], cotangent: Tensor) -> Tensors:
    """The logits, and in training every parameter's gradient."""
    inputs = {name: t.to(_device()) for name, t in inputs.items()}
    if not sharded.training:
        with torch.no_grad():
            return {"y": _on_cpu(zoo.output(model, inputs))}
    model.zero_grad(set_to_none=True)
    y = zoo.output(model, inputs)
    torch.autograd.backward(y, cotangent.to(y))
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {name: _on_cpu(t) for name, t in _whole({"y": y, **gradients}, sharded).items()}


class Planted(Exception):
    """The exception that a check raises inside of a rank's experts."""


@on_model
def raising(model: Any, sharded: Sharded, inputs: ExpertsInputs, culprit: int, when: str) -> None:
    """One rank's experts raise, in their forward or in their backward."""
    module = experts(model)
    if dist.get_rank() == culprit:
        implementation = ALL_EXPERTS_FUNCTIONS[module.config._experts_implementation]

        def planted(*arguments: Any) -> Tensor:
            if when == "forward":
                raise Planted(PLANTED)
            y: Tensor = _RaisingBackward.apply(implementation(*arguments))  # type: ignore[no-untyped-call]
            return y

        ALL_EXPERTS_FUNCTIONS.register("planted", planted)
        module.config._experts_implementation = "planted"
    _run(module, sharded, inputs, backward=True)


class _RaisingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise Planted(PLANTED)
