"""Experts that Transformers has sharded over ranks: reading what they run on, and running them through a dispatcher.

Transformers replaces the forward of such a module by a closure, another one from version to version:

- 5.23 on: `ep_forward` around an `EPImplementation`;
- 5.19 to 5.22: `ep_forward`, which is an all-to-all and nothing else;
- 5.17, 5.18: `tp_forward`, which sums over ranks that share one batch. Routers slice what they chose, in a closure of
  their own.

What a dispatcher needs is in the closure: the experts' own forward and the meshes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hf_moe_backends.registry import registry

HAS_IMPLEMENTATIONS = Version(transformers.__version__) >= Version("5.23")
"""Whether this Transformers has `EPImplementationInterface`."""

ExpertsForward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Rows (R, H), this rank's expert ids (R, K), weights (R, K) -> (R, H)."""


class Dispatcher(Protocol):
    """What a dispatcher's target constructs: `target(experts, ep_mesh, tp_mesh, **options)`.

    The ranks of `tp_mesh` have one batch, those of `ep_mesh` have all experts together, `experts.num_experts` each, in
    the order of their ranks.
    """

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Tokens (T, H), ids (T, K) of all experts, weights (T, K) -> what this rank's experts run on, and a state.

        That is rows (R, H), ids (R, K') of this rank's experts and weights (R, K'). A pair for another rank has weight
        0 and an id as the spec's `hands` says. R may be 0.
        """
        ...

    def combine(self, y: Tensor, state: Any) -> Tensor:
        """Outputs (R, H) of the experts -> (T, H)."""
        ...


def is_dispatcher(target: Any) -> bool:
    """Whether this class has the two calls of a `Dispatcher`. Else it is one whole call, as stock's are."""
    return all(callable(getattr(target, name, None)) for name in ("dispatch", "combine"))


class Dispatched:
    """A dispatcher around experts, in the form of Transformers' `EPImplementation`."""

    def __init__(
        self,
        target: Callable[..., Dispatcher],
        negative_ids: bool,
        experts: nn.Module,
        ep_mesh: DeviceMesh,
        tp_mesh: DeviceMesh,
    ):
        self.experts: Any = experts
        self.negative_ids = negative_ids
        self.dispatcher = target(experts, ep_mesh, tp_mesh)
        self.experts_forward: ExpertsForward = experts.forward
        self.ep_mesh, self.tp_mesh = ep_mesh, tp_mesh

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        rows, local, shares, state = self.dispatcher.dispatch(x, ids, weights)
        if self.negative_ids and not takes_negative_ids(getattr(self.experts.config, "_experts_implementation", None)):
            local = local.masked_fill(local < 0, self.experts.num_experts)
        if rows.shape[0]:
            y = self.experts_forward(rows, local, shares)
        else:
            # one row of zeros, so that the backward runs through the experts and their sharding on this rank too
            row, share = rows.sum(0, keepdim=True), shares.sum().reshape(1, 1)
            y = self.experts_forward(row, local.new_zeros(1, 1), share)[:0]
        return self.dispatcher.combine(y, state)


@cache
def takes_negative_ids(implementation: str | None) -> bool:
    """Whether the experts backend that has this name in a config declares ids of -1.

    Asked at each call: `set_experts_implementation` may have changed it, and stock code returns zeros on them in
    silence.
    """
    name = (implementation or "").partition("{")[0]
    found = [backend for backend in registry().of_kind("experts") if backend.spec.name == name]
    return len(found) == 1 and "negative_ids" in found[0].spec.capabilities.features


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """What a sharded experts module runs on.

    Attributes:
        experts_forward: the experts' own, on this rank's ids.
        ep_mesh, tp_mesh: one-dimensional.
        implementation: the object that brings tokens to experts; None where stock's closure does it by itself.
        style: stock's, below 5.23.
    """

    experts_forward: ExpertsForward
    ep_mesh: DeviceMesh
    tp_mesh: DeviceMesh
    implementation: Any = None
    style: Any = None

    @property
    def stock_name(self) -> str | None:
        """The name of the stock dispatcher that runs, or None."""
        if self.implementation is None:
            return "all_to_all" if type(self.style).__name__ == "EpDispatchExpertsParallel" else "all_reduce"
        names = {"AllToAllEP": "all_to_all", "AllReduceEP": "all_reduce"}
        return names.get(type(self.implementation).__name__)


def sharded(experts: nn.Module) -> Sharded | None:
    """What this module runs on if Transformers sharded its experts over ranks, else None."""
    held = _closure(vars(experts).get("forward"))
    running: Any = held.get("implementation")
    if all(hasattr(running, name) for name in ("experts_forward", "ep_mesh", "tp_mesh")):
        return Sharded(
            experts_forward=running.experts_forward,
            ep_mesh=running.ep_mesh,
            tp_mesh=running.tp_mesh,
            implementation=running,
            style=held.get("style"),
        )
    if {"experts_forward", "ep_mesh", "tp_mesh", "self"} <= held.keys():
        return Sharded(
            experts_forward=held["experts_forward"],
            ep_mesh=held["ep_mesh"],
            tp_mesh=held["tp_mesh"],
            style=held["self"],
        )
    if type(held.get("self")).__name__ == "MoeExpertsParallel" and _whole_experts(experts):
        mesh = held["mesh"]
        mesh = mesh if mesh.ndim == 1 else mesh["tp"]
        return Sharded(experts_forward=held["original_forward"], ep_mesh=mesh, tp_mesh=mesh, style=held["self"])
    return None


def _closure(forward: Any) -> dict[str, Any]:
    names = getattr(getattr(forward, "__code__", None), "co_freevars", ())
    cells = getattr(forward, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _whole_experts(experts: nn.Module) -> bool:
    """Whether experts, and not slices of every expert, are spread over ranks. Before 5.18 one style did both."""
    own = [p for p in experts.parameters(recurse=False) if isinstance(p, DTensor)]
    return bool(own) and all(placement.is_shard(0) for p in own for placement in p.placements)


def install(experts: nn.Module, now: Sharded, key: str, target: Callable[..., Any] | None) -> None:
    """Run a sharded module through another dispatcher.

    Args:
        now: what it runs on.
        key: the name of the dispatcher in `EPImplementationInterface`, from 5.23 on.
        target: what constructs it, before.
    """
    # constructors read the experts' own forward there
    vars(experts)["forward"] = now.experts_forward
    if HAS_IMPLEMENTATIONS:
        from transformers.distributed.expert_parallel import EpDispatchExpertsParallel

        EpDispatchExpertsParallel().install_forward(experts, now.ep_mesh, tp_mesh=now.tp_mesh, ep_implementation=key)
        return
    assert target is not None
    implementation, style = target(experts, now.ep_mesh, now.tp_mesh), now.style

    def ep_forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x, weights = _local(hidden_states), _local(top_k_weights)
        with style.context_around_forward(experts, implementation.ep_mesh):
            y: Tensor = implementation(x, top_k_index, weights)
        return y.to(x.dtype)

    vars(experts)["forward"] = ep_forward


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def slicing_routers(root: nn.Module) -> Iterator[nn.Module]:
    """Routers that keep the choices of this rank's experts only, as those of 5.17 and 5.18 do for the stock sum."""
    for module in root.modules():
        if type(_closure(vars(module).get("forward")).get("self")).__name__ == "EpRouterParallel":
            yield module
