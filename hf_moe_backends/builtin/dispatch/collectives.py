"""Collectives with a backward, and the lengths that ranks tell each other.

Plain collectives in `autograd.Function`s: torch's functional wrappers more than double a layer's forward.

Each runs its collective in the backward whether or not a gradient came, since the other ranks do.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

Group = dist.ProcessGroup


def padded(t: Tensor, length: int, value: int = 0) -> Tensor:
    """(T, ...) -> (length, ...), with rows of `value` behind."""
    if length == len(t):
        return t
    return F.pad(t, [0, 0] * (t.ndim - 1) + [0, length - len(t)], value=value)


def gather(t: Tensor, group: Group) -> Tensor:
    """(L, ...) on each of G ranks -> (G * L, ...)."""
    found = t.new_empty(group.size() * len(t), *t.shape[1:])
    dist.all_gather_into_tensor(found, t.contiguous(), group=group)
    return found


def reduce_scatter(t: Tensor, group: Group) -> Tensor:
    """(G * L, ...) -> (L, ...): the sum over ranks of the part that is this rank's."""
    found = t.new_empty(len(t) // group.size(), *t.shape[1:])
    dist.reduce_scatter_tensor(found, t.contiguous(), group=group)
    return found


def total(t: Tensor, group: Group) -> Tensor:
    """The sum over ranks of a tensor that each has."""
    found = t.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(found, group=group)
    return found


def slice_of(t: Tensor, group: Group, value: int = 0) -> Tensor:
    """(T, ...) that all ranks have -> (ceil(T / G), ...), padded with rows of `value`."""
    length = -(-len(t) // group.size())
    start = group.rank() * length
    return padded(t[start : start + length], length, value)


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return total(gradient, ctx.group), None


def sum_gradient(t: Tensor, group: Group) -> Tensor:
    """`t`, which all ranks have and each uses in part: its gradient is the sum of theirs."""
    out: Tensor = _SumGradient.apply(t, group)  # type: ignore[no-untyped-call]
    return out


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, group: Group) -> Tensor:
        return total(t, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def sum_over(t: Tensor, group: Group) -> Tensor:
    """The sum over ranks, whose gradient all of them have."""
    out: Tensor = _Sum.apply(t, group)  # type: ignore[no-untyped-call]
    return out


class _Slice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.rows = group, len(t)
        return slice_of(t, group).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gather(gradient, ctx.group)[: ctx.rows], None


def shared_slice(t: Tensor, group: Group) -> Tensor:
    """`slice_of`; the gradients of the slices are put together."""
    out: Tensor = _Slice.apply(t, group)  # type: ignore[no-untyped-call]
    return out


class _Unslice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, group: Group, rows: int) -> Tensor:
        ctx.group = group
        return gather(t, group)[:rows]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return slice_of(gradient, ctx.group), None, None


def unslice(t: Tensor, group: Group, rows: int) -> Tensor:
    """(ceil(rows / G), ...) -> (rows, ...) on all ranks, whose gradient all of them have."""
    out: Tensor = _Unslice.apply(t, group, rows)  # type: ignore[no-untyped-call]
    return out


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor, weights: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
        ctx.group = group
        wide = weights.dtype == torch.float64
        whole, number = (torch.int64, torch.float64) if wide else (torch.int32, torch.float32)
        # ids and weights in one message; float32 holds every narrower weight exactly
        routing = gather(torch.cat([ids.to(whole), weights.to(number).view(whole)], dim=1), group)
        top_k = ids.shape[1]
        all_ids, all_weights = routing[:, :top_k], routing[:, top_k:]
        all_ids = all_ids.long()
        ctx.mark_non_differentiable(all_ids)
        return gather(x, group), all_ids, all_weights.contiguous().view(number).to(weights.dtype)

    @staticmethod
    def backward(ctx: Any, dx: Tensor, _: Tensor, dweights: Tensor) -> Any:
        want_x, _, want_weights, _ = ctx.needs_input_grad
        return (
            reduce_scatter(dx, ctx.group) if want_x else None,
            None,
            reduce_scatter(dweights, ctx.group) if want_weights else None,
            None,
        )


def gather_tokens(x: Tensor, ids: Tensor, weights: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """(L, H), (L, K), (L, K) on each of G ranks -> (G * L, ...) of each. Two collectives, and two in the backward."""
    out: tuple[Tensor, Tensor, Tensor] = _GatherTokens.apply(x, ids, weights, group)  # type: ignore[no-untyped-call]
    return out


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return reduce_scatter(y, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gather(gradient, ctx.group), None


def scatter_sum(y: Tensor, group: Group) -> Tensor:
    """(G * L, H) on each of G ranks -> (L, H), this rank's part of the sum."""
    out: Tensor = _ScatterSum.apply(y, group)  # type: ignore[no-untyped-call]
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        found = t.new_empty(sum(received), *t.shape[1:])
        dist.all_to_all_single(found, t.contiguous(), received, sent, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        sent, received = ctx.sizes
        found = gradient.new_empty(sum(sent), *gradient.shape[1:])
        dist.all_to_all_single(found, gradient.contiguous(), sent, received, group=ctx.group)
        return found, None, None, None


def exchange(t: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    """Rows (sum of sent, ...), in the order of the ranks that they are for -> (sum of received, ...), of those they are
    from."""
    out: Tensor = _Exchange.apply(t, sent, received, group)  # type: ignore[no-untyped-call]
    return out


_on_cpu: weakref.WeakKeyDictionary[Group, Group] = weakref.WeakKeyDictionary()


def cpu_group(group: Group) -> Group:
    """A gloo group of the same ranks, to tell lengths without waiting for a device. Made once, by all of them."""
    if "cpu:gloo" in dist.get_backend_config(group):
        return group
    if group not in _on_cpu:
        made = dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        _on_cpu[group] = made
    return _on_cpu[group]


def longest(length: int, group: Group) -> int:
    """The greatest of the lengths that the ranks of a CPU group have."""
    greatest = torch.tensor(length)
    dist.all_reduce(greatest, dist.ReduceOp.MAX, group=group)
    return int(greatest)
