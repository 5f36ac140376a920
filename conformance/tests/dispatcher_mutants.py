"""Deliberately wrong dispatchers, each with the cells that must catch it, as `mutants.py` has them for other kinds.

Each is `right_dispatcher` but for one bug. That one gathers the tokens of all ranks, runs this rank's experts on them
and sums the outputs: slow, short, and right on every way of sharding.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mutants import Mutant
from torch import Tensor

from hf_moe_backends import BackendSpec, Capabilities, hookimpl

DISPATCHER_MUTANTS: list[Mutant] = []


def mutant(*kills: str) -> Callable[[Any], Any]:
    def declare(target: Any) -> Any:
        bug = (target.__doc__ or "").strip().rstrip(".")
        assert bug and kills, target
        DISPATCHER_MUTANTS.append(Mutant("dispatcher", target.__name__, kills, bug))
        return target

    return declare


@hookimpl
def hf_moe_backends_register() -> list[BackendSpec]:
    capabilities = Capabilities(dtypes=frozenset({"float32", "bfloat16"}))
    names = ["right_dispatcher", "inference_only", "float32_only", *(m.name for m in DISPATCHER_MUTANTS)]
    limits = {
        "inference_only": Capabilities(dtypes=capabilities.dtypes, training=False),
        "float32_only": Capabilities(dtypes=frozenset({"float32"})),
    }
    return [
        BackendSpec(
            kind="dispatcher",
            name=name,
            target=f"dispatcher_mutants:{name}",
            capabilities=limits.get(name, capabilities),
        )
        for name in names
    ]


def gathered(x: Tensor, group: Any) -> Tensor:
    """(size * T, ...): what each rank of a group has. All have as many."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def own_part(x: Tensor, group: Any) -> Tensor:
    return x.chunk(dist.get_world_size(group))[dist.get_rank(group)]


def summed(x: Tensor, group: Any) -> Tensor:
    """(T, ...) of (size * T, ...): the sum over ranks of the part that is this rank's."""
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return own_part(total, group)


class _Gather(torch.autograd.Function):
    """The tokens of all ranks. Each rank's gradient is the sum of what all ranks have for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, backward: Callable[[Tensor, Any], Tensor]) -> Tensor:
        ctx.group, ctx.sum = group, backward
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.sum(gradient, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    """The sum over ranks of each rank's rows; the backward of `_Gather`, and it of this."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return summed(y, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gathered(gradient, ctx.group), None


class _Slice(torch.autograd.Function):
    """This rank's slice of rows that a TP group shares. Their gradient is shared as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return own_part(x, group).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gathered(gradient, ctx.group), None


class _Unslice(torch.autograd.Function):
    """The rows of all slices, on every rank of the TP group. Each rank has the same gradient of them."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return gathered(y, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return own_part(gradient, ctx.group).clone(), None


class right_dispatcher:  # noqa: N801 - backends are named so
    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any):
        self.experts_forward = experts.forward
        self.local = experts.num_experts
        self.ep_mesh, self.tp_mesh = ep_mesh, tp_mesh
        self.group, self.tp_group = ep_mesh.get_group(), tp_mesh.get_group()
        self.rank = ep_mesh.get_local_rank()

    def __call__(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        tokens = len(x)
        slices = self.slices()
        # as many on every rank of the expert group, and one at least
        length = self.longest(-(-tokens // slices))
        x, ids, shares = (self.padded(t, length * slices) for t in (x, ids, shares))
        if slices > 1:
            x, shares = _Slice.apply(x, self.tp_group), _Slice.apply(shares, self.tp_group)
            ids = own_part(ids, self.tp_group)
        y = self.exchanged(x, ids, shares)
        if slices > 1:
            y = _Unslice.apply(y, self.tp_group)
        return y[:tokens]

    def slices(self) -> int:
        return self.tp_mesh.size()  # type: ignore[no-any-return]

    def longest(self, tokens: int) -> int:
        longest = torch.tensor(tokens, device=self.ep_mesh.device_type)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.group)
        return max(1, int(longest))

    def padded(self, rows: Tensor, length: int) -> Tensor:
        return F.pad(rows, (0, 0, 0, length - len(rows)), value=0 if rows.is_floating_point() else -1)

    def exchanged(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        """(T, H) -> (T, H), T the same on all ranks of the expert group."""
        x = _Gather.apply(x, self.group, self.token_gradient)
        shares = _Gather.apply(shares, self.group, summed)
        y = self.run_experts(x, *self.on_this_rank(gathered(ids, self.group), shares))
        return _Scatter.apply(y, self.group)  # type: ignore[no-any-return]

    token_gradient = staticmethod(summed)

    def on_this_rank(self, ids: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        foreign = ids // self.local != self.rank
        return torch.where(foreign, self.local, ids % self.local), shares.masked_fill(foreign, 0)

    def run_experts(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        return self.experts_forward(x, ids, shares)  # type: ignore[no-any-return]


class inference_only(right_dispatcher):  # noqa: N801
    """Right, and claims no training."""


class float32_only(right_dispatcher):  # noqa: N801
    """Right, and claims float32 only."""
