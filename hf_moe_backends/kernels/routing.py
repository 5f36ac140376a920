"""Which rows are whose: a stable counting sort of the routed pairs by expert, without asking the device anything."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_moe_backends.kernels.triton_or_none import cdiv, jit, next_power_of_2, tl, use_triton


class Routing(NamedTuple):
    """The routed pairs in the order of their experts.

    Pairs whose id is no local expert (other ranks' pairs) have position -1 and no row. Rows from `offsets[-1]` on
    belong to nobody: their `order` is some pair, and kernels neither read nor write them.
    """

    order: Tensor  # (R,) int32: the pair of each row
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


def _sort_triton(ids: Tensor, num_experts: int) -> Routing:
    columns = next_power_of_2(num_experts)
    # One program holds a (pairs, experts) table of where each pair goes: 16384 entries fit in its registers.
    pairs = max(16, min(1024, 16384 // columns))
    blocks = cdiv(ids.numel(), pairs)
    order = ids.new_zeros(ids.numel(), dtype=torch.int32)
    position = torch.empty_like(order)
    if blocks == 0:
        return Routing(order, position, ids.new_zeros(num_experts, dtype=torch.int32))
    counts = ids.new_empty((num_experts, blocks), dtype=torch.int32)
    _count[(blocks,)](ids, counts, ids.numel(), blocks, num_experts, PAIRS=pairs, EXPERTS=columns)
    # Expert-major, so that one running sum says where each block's pairs of each expert end.
    ends = counts.view(-1).cumsum(0, dtype=torch.int32)
    _place[(blocks,)](
        ids, counts, ends, order, position, ids.numel(), blocks, num_experts, PAIRS=pairs, EXPERTS=columns
    )
    return Routing(order, position, ends.view(num_experts, blocks)[:, -1].contiguous())


@jit
def _count(ids, counts, size, blocks, num_experts, PAIRS: tl.constexpr, EXPERTS: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0)
    pair = block * PAIRS + tl.arange(0, PAIRS)
    expert = tl.arange(0, EXPERTS)
    own = tl.load(ids + pair, mask=pair < size, other=-1)
    hits = (own[:, None] == expert[None, :]).to(tl.int32)
    tl.store(counts + expert * blocks + block, tl.sum(hits, 0), mask=expert < num_experts)


@jit
def _place(  # type: ignore[no-untyped-def]
    ids,
    counts,
    ends,
    order,
    position,
    size,
    blocks,
    num_experts,
    PAIRS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    block = tl.program_id(0)
    pair = block * PAIRS + tl.arange(0, PAIRS)
    expert = tl.arange(0, EXPERTS)
    own = tl.load(ids + pair, mask=pair < size, other=-1)
    hits = ((own[:, None] == expert[None, :]) & (expert < num_experts)[None, :]).to(tl.int32)
    cell = expert * blocks + block
    end = tl.load(ends + cell, mask=expert < num_experts, other=0)
    start = end - tl.load(counts + cell, mask=expert < num_experts, other=0)
    # the pairs of the same expert up to and including this one, within the block
    rank = tl.cumsum(hits, 0)
    place = tl.sum(hits * (start[None, :] + rank - 1), 1)
    valid = tl.sum(hits, 1) > 0
    tl.store(position + pair, tl.where(valid, place, -1), mask=pair < size)
    tl.store(order + place, pair, mask=valid & (pair < size))
