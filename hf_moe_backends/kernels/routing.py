"""Which rows are whose: a stable counting sort of the routed pairs by expert, without asking the device anything."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_moe_backends.kernels.triton_or_none import cdiv, jit, next_power_of_2, tl, use_triton


class Routing(NamedTuple):
    """The routed pairs in the order of their experts.

    Pairs whose id is no local expert (other ranks' pairs) have position -1 and no row. Rows from `offsets[-1]` on
    belong to nobody, and kernels neither read nor write them; `order` names the pairs of other ranks there.
    """

    order: Tensor  # (R,) int32: the pair of each row, every pair once
    position: Tensor  # (R,) int32: the row of each pair, or -1
    offsets: Tensor  # (E,) int32: where each expert's rows end


def sort_by_expert(ids: Tensor, num_experts: int) -> Routing:
    """Sort pairs by expert, keeping the order of pairs within one expert.

    Args:
        ids: (T, K) integers. Ids outside 0..E-1 are pairs of other ranks.
    """
    ids = ids.reshape(-1)
    return _sort_triton(ids, num_experts) if use_triton(ids) else _sort_torch(ids, num_experts)


def _sort_torch(ids: Tensor, num_experts: int) -> Routing:
    ids = torch.where((ids < 0) | (ids >= num_experts), num_experts, ids)
    sorted_ids, order = torch.sort(ids, stable=True)
    experts = torch.arange(num_experts, device=ids.device, dtype=ids.dtype)
    offsets = torch.searchsorted(sorted_ids, experts, right=True).to(torch.int32)
    places = torch.arange(ids.numel(), device=ids.device, dtype=torch.int32)
    places = torch.where(sorted_ids == num_experts, -1, places)
    position = torch.empty_like(places).scatter_(0, order, places)
    return Routing(order.to(torch.int32), position, offsets)


_BLOCKS = 512
"""Programs of the sort: enough to fill a GPU, few enough that each can add up all the others' counts itself."""


def _sort_triton(ids: Tensor, num_experts: int) -> Routing:
    """In two launches: at the start of a layer the device has nothing else to do, so that each launch is waited for."""
    size = ids.numel()
    order, position = (ids.new_empty(size, dtype=torch.int32) for _ in range(2))
    columns = next_power_of_2(num_experts)
    # A table of where each pair goes, (pairs, experts): 16384 entries fit in a program's registers.
    pairs = max(16, min(1024, 16384 // columns))
    steps = max(1, cdiv(size, pairs * _BLOCKS))
    blocks = max(1, cdiv(size, pairs * steps))
    counts = ids.new_empty((blocks, num_experts), dtype=torch.int32)
    offsets = ids.new_empty(num_experts, dtype=torch.int32)
    shape = {"PAIRS": pairs, "EXPERTS": columns, "num_warps": 8}
    _count[(blocks,)](ids, counts, size, steps, num_experts, **shape)
    _place[(blocks,)](ids, counts, order, position, offsets, size, steps, blocks, num_experts, **shape)
    return Routing(order, position, offsets)


@jit
def _hits(ids, pair, size, num_experts, EXPERTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(PAIRS, EXPERTS): 1 where a pair is the expert's."""
    expert = tl.arange(0, EXPERTS)
    own = tl.load(ids + pair, mask=pair < size, other=-1)
    return ((own[:, None] == expert[None, :]) & (expert < num_experts)[None, :]).to(tl.int32)


@jit
def _count(ids, counts, size, steps, num_experts, PAIRS: tl.constexpr, EXPERTS: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    for step in range(steps):
        pair = (block * steps + step) * PAIRS + tl.arange(0, PAIRS)
        total += tl.sum(_hits(ids, pair, size, num_experts, EXPERTS), 0)
    tl.store(counts + block * num_experts + expert, total, mask=expert < num_experts)


@jit
def _place(  # type: ignore[no-untyped-def]
    ids,
    counts,
    order,
    position,
    offsets,
    size,
    steps,
    blocks,
    num_experts,
    PAIRS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    block = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    start = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, blocks, PAIRS):
        other = first + tl.arange(0, PAIRS)
        mask = (other < blocks)[:, None] & (expert < num_experts)[None, :]
        found = tl.load(counts + other[:, None] * num_experts + expert[None, :], mask=mask, other=0)
        total += tl.sum(found, 0)
        start += tl.sum(tl.where((other < block)[:, None], found, 0), 0)
    all_valid = tl.sum(total, 0)
    valid_before = tl.sum(start, 0)
    ends = tl.cumsum(total, 0)
    if block == 0:
        tl.store(offsets + expert, ends, mask=expert < num_experts)
    start += ends - total
    for step in range(steps):
        pair = (block * steps + step) * PAIRS + tl.arange(0, PAIRS)
        hits = _hits(ids, pair, size, num_experts, EXPERTS)
        rank = tl.cumsum(hits, 0)  # the expert's pairs up to and including this one
        row = tl.sum(hits * (start[None, :] + rank - 1), 1)
        valid = tl.sum(hits, 1)
        # pairs of other ranks go behind all the others, in their order
        row = tl.where(valid > 0, row, all_valid + pair - valid_before - (tl.cumsum(valid, 0) - valid))
        tl.store(position + pair, tl.where(valid > 0, row, -1), mask=pair < size)
        tl.store(order + row, pair, mask=pair < size)
        start += tl.sum(hits, 0)
        valid_before += tl.sum(valid, 0)
