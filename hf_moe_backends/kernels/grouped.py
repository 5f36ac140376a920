"""Grouped matrix products: every expert's rows times its matrix, the weight gradients, and the bias gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_moe_backends.kernels.routing import Routing
from hf_moe_backends.kernels.rows import accumulator
from hf_moe_backends.kernels.triton_or_none import cdiv, jit, next_power_of_2, tl, use_triton


def rows_times_experts(rows: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """Row r of expert e times matrices[e].

    Args:
        rows: (R, A) sorted by expert.
        matrices: (E, A, B), contiguous or transposed in its last two dimensions.
        offsets: (E,) int32, where each expert's rows end.

    Returns:
        (R, B). Rows from offsets[-1] on are unwritten on CUDA and zero elsewhere.
    """
    if _torch_has_kernel(rows, matrices):
        return F.grouped_mm(rows, matrices, offs=offsets)
    if use_triton(rows):
        return _rows_times_experts_triton(rows, matrices, offsets)
    out = rows.new_zeros(rows.shape[0], matrices.shape[2])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        torch.mm(rows[start:end], matrices[expert], out=out[start:end])
        start = end
    return out


def experts_outer(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """The sum over each expert's rows of the outer product of two rows: left[e].T @ right[e].

    Args:
        left: (R, A), right: (R, B), both sorted by expert.

    Returns:
        (E, A, B), exactly zero for experts without rows.
    """
    if _torch_has_kernel(left, right):
        return F.grouped_mm(left.t(), right, offs=offsets)
    if use_triton(left):
        return _experts_outer_triton(left, right, offsets)
    out = left.new_zeros(offsets.numel(), left.shape[1], right.shape[1])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        torch.mm(left[start:end].t(), right[start:end], out=out[expert])
        start = end
    return out


class Products(NamedTuple):
    """The two grouped products that an experts layer is made of, with the contracts of the functions above.

    Rows from offsets[-1] on may hold anything on the way in and out.
    """

    rows_times_experts: Callable[[Tensor, Tensor, Tensor], Tensor]
    experts_outer: Callable[[Tensor, Tensor, Tensor], Tensor]


PRODUCTS: dict[str, Products] = {"torch": Products(rows_times_experts, experts_outer)}
"""By name, since an operator takes strings and no functions."""


def expert_sums(rows: Tensor, offsets: Tensor, *, of_tokens: tuple[Routing, Tensor] | None = None) -> Tensor:
    """The sum of each expert's rows, for the gradient of a bias.

    Args:
        rows: (R, B), or with `of_tokens` (T, B).
        of_tokens: the routing and the weights (T, K) with which `rows` holds tokens: each row is then its token times
            the pair's weight.

    Returns:
        (E, B) in the accumulator's dtype, summed in a fixed order.
    """
    if use_triton(rows):
        return _expert_sums_triton(rows, offsets, of_tokens)
    acc = accumulator(rows.dtype)
    if of_tokens is None:
        values = rows.to(acc)
    else:
        routing, weights = of_tokens
        order = routing.order.long()
        values = rows[order // weights.shape[1]].to(acc) * weights.reshape(-1, 1)[order].to(acc)
    out = values.new_zeros(offsets.numel(), rows.shape[1])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        torch.sum(values[start:end], 0, out=out[expert])
        start = end
    return out


def _torch_has_kernel(rows: Tensor, other: Tensor) -> bool:
    """Whether `F.grouped_mm` takes these operands and computes them without asking the device anything.

    It knows no float64, wants strides of whole 16 bytes and data on 16-byte boundaries, which a memory-mapped
    checkpoint need not have. On CUDA its fast kernel is bfloat16's alone; the others loop over experts on the host.
    """
    dtypes = (torch.bfloat16,) if rows.is_cuda else (torch.float32, torch.bfloat16, torch.float16)
    if rows.dtype not in dtypes or rows.shape[0] == 0:
        return False
    per_16_bytes = 16 // rows.element_size()
    sizes = (rows.shape[1], *other.shape[1:])
    aligned = rows.data_ptr() % 16 == 0 and other.data_ptr() % 16 == 0
    return aligned and not any(size % per_16_bytes for size in sizes)


def _precision(rows: Tensor) -> str:
    """Of a product of float32 operands: TF32 only if the user allows it for all of torch."""
    return "tf32" if rows.is_cuda and torch.backends.cuda.matmul.allow_tf32 else "ieee"


_TILE_ROWS, _TILE_COLUMNS, _TILE_DEPTH = 64, 64, 32


def _rows_times_experts_triton(rows: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    (size, depth), width = rows.shape, matrices.shape[2]
    out = rows.new_empty(size, width)
    if out.numel():
        # every expert may end in a tile that is not full
        tiles = cdiv(size, _TILE_ROWS) + offsets.numel()
        _rows_times_experts_kernel[(tiles, cdiv(width, _TILE_COLUMNS))](
            rows,
            matrices,
            offsets,
            out,
            depth,
            width,
            offsets.numel(),
            *rows.stride(),
            *matrices.stride(),
            PRECISION=_precision(rows),
            DOUBLE=rows.dtype == torch.float64,
            EXPERTS=next_power_of_2(offsets.numel()),
            TILE_ROWS=_TILE_ROWS,
            TILE_COLUMNS=_TILE_COLUMNS,
            TILE_DEPTH=_TILE_DEPTH,
            num_warps=4,
        )
    return out


@jit
def _tile_of(offsets, num_experts, tile, EXPERTS: tl.constexpr, TILE_ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The expert of a tile of rows, where the tile starts and where the expert's rows end; E for a tile too many."""
    expert = tl.arange(0, EXPERTS)
    end = tl.load(offsets + expert, mask=expert < num_experts, other=0)
    start = tl.load(offsets + expert - 1, mask=(expert > 0) & (expert < num_experts), other=0)
    tiles = tl.where(expert < num_experts, (end - start + TILE_ROWS - 1) // TILE_ROWS, 0)
    tiles_end = tl.cumsum(tiles, 0)
    own = tl.sum(((tiles_end <= tile) & (expert < num_experts)).to(tl.int32), 0)
    here = expert == own
    first = tl.sum(tl.where(here, start, 0), 0) + (tile - tl.sum(tl.where(here, tiles_end - tiles, 0), 0)) * TILE_ROWS
    return own, first, tl.sum(tl.where(here, end, 0), 0)


@jit
def _rows_times_experts_kernel(  # type: ignore[no-untyped-def]
    rows,
    matrices,
    offsets,
    out,
    depth,
    width,
    num_experts,
    rows_stride_r,
    rows_stride_a,
    stride_e,
    stride_a,
    stride_b,
    PRECISION: tl.constexpr,
    DOUBLE: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
):
    acc: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    expert, first, end = _tile_of(offsets, num_experts, tl.program_id(0), EXPERTS, TILE_ROWS)
    if expert >= num_experts:
        return
    row = first + tl.arange(0, TILE_ROWS)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    row64 = row.to(tl.int64)
    column64 = column.to(tl.int64)
    base = matrices + expert.to(tl.int64) * stride_e
    total = tl.zeros((TILE_ROWS, TILE_COLUMNS), acc)
    for start in range(0, depth, TILE_DEPTH):
        a = start + tl.arange(0, TILE_DEPTH)
        left = tl.load(
            rows + row64[:, None] * rows_stride_r + a[None, :] * rows_stride_a,
            mask=(row < end)[:, None] & (a < depth)[None, :],
            other=0,
        )
        right = tl.load(
            base + a.to(tl.int64)[:, None] * stride_a + column64[None, :] * stride_b,
            mask=(a < depth)[:, None] & (column < width)[None, :],
            other=0,
        )
        total = tl.dot(left, right, total, input_precision=PRECISION, out_dtype=acc)
    mask = (row < end)[:, None] & (column < width)[None, :]
    tl.store(out + row64[:, None] * width + column64[None, :], total.to(out.dtype.element_ty), mask=mask)


def _experts_outer_triton(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    height, width = left.shape[1], right.shape[1]
    out = left.new_empty(offsets.numel(), height, width)
    if out.numel():
        _experts_outer_kernel[(offsets.numel(), cdiv(height, _TILE_ROWS), cdiv(width, _TILE_COLUMNS))](
            left,
            right,
            offsets,
            out,
            height,
            width,
            *left.stride(),
            *right.stride(),
            PRECISION=_precision(left),
            DOUBLE=left.dtype == torch.float64,
            TILE_ROWS=_TILE_ROWS,
            TILE_COLUMNS=_TILE_COLUMNS,
            TILE_DEPTH=_TILE_DEPTH,
            num_warps=4,
        )
    return out


@jit
def _experts_outer_kernel(  # type: ignore[no-untyped-def]
    left,
    right,
    offsets,
    out,
    height,
    width,
    left_stride_r,
    left_stride_a,
    right_stride_r,
    right_stride_b,
    PRECISION: tl.constexpr,
    DOUBLE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
):
    acc: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    expert = tl.program_id(0)
    begin = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    line = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(2) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    total = tl.zeros((TILE_ROWS, TILE_COLUMNS), acc)
    for start in range(begin, end, TILE_DEPTH):
        row = start + tl.arange(0, TILE_DEPTH)
        row64 = row.to(tl.int64)
        first = tl.load(
            left + row64[None, :] * left_stride_r + line[:, None] * left_stride_a,
            mask=(row < end)[None, :] & (line < height)[:, None],
            other=0,
        )
        second = tl.load(
            right + row64[:, None] * right_stride_r + column[None, :] * right_stride_b,
            mask=(row < end)[:, None] & (column < width)[None, :],
            other=0,
        )
        total = tl.dot(first, second, total, input_precision=PRECISION, out_dtype=acc)
    mask = (line < height)[:, None] & (column < width)[None, :]
    target = out + expert.to(tl.int64) * height * width + line.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=mask)


_SUM_ROWS, _SUM_COLUMNS = 128, 128


def _expert_sums_triton(rows: Tensor, offsets: Tensor, of_tokens: tuple[Routing, Tensor] | None) -> Tensor:
    """In two steps, so that one expert with most of the rows is summed by many programs, and without atomics."""
    size = rows.shape[0] if of_tokens is None else of_tokens[0].order.numel()
    width, num_experts = rows.shape[1], offsets.numel()
    tiles = cdiv(size, _SUM_ROWS) + num_experts
    acc = accumulator(rows.dtype)
    out = rows.new_empty(num_experts, width, dtype=acc)
    if not out.numel():
        return out
    partial = rows.new_empty(tiles, width, dtype=acc)
    routing, weights = of_tokens if of_tokens is not None else (None, None)
    shape = {"EXPERTS": next_power_of_2(num_experts), "TILE_ROWS": _SUM_ROWS, "COLUMNS": _SUM_COLUMNS}
    double = rows.dtype == torch.float64
    _tile_sums_kernel[(tiles, cdiv(width, _SUM_COLUMNS))](
        rows,
        routing.order if routing is not None else None,
        weights,
        offsets,
        partial,
        width,
        num_experts,
        weights.shape[1] if weights is not None else 1,
        OF_TOKENS=of_tokens is not None,
        DOUBLE=double,
        **shape,
    )
    _sum_tiles_kernel[(num_experts, cdiv(width, _SUM_COLUMNS))](
        partial, offsets, out, width, num_experts, DOUBLE=double, **shape
    )
    return out


@jit
def _tile_sums_kernel(  # type: ignore[no-untyped-def]
    rows,
    order,
    weights,
    offsets,
    partial,
    width,
    num_experts,
    top_k,
    OF_TOKENS: tl.constexpr,
    DOUBLE: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    acc: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    tile = tl.program_id(0)
    expert, first, end = _tile_of(offsets, num_experts, tile, EXPERTS, TILE_ROWS)
    if expert >= num_experts:
        return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = first + tl.arange(0, TILE_ROWS)
    used = row < end
    source = row.to(tl.int64)
    if OF_TOKENS:
        pair = tl.load(order + row, mask=used, other=0)
        source = (pair // top_k).to(tl.int64)
    mask = used[:, None] & (column < width)[None, :]
    value = tl.load(rows + source[:, None] * width + column[None, :], mask=mask, other=0).to(acc)
    if OF_TOKENS:
        value *= tl.load(weights + pair, mask=used, other=0).to(acc)[:, None]
    tl.store(partial + tile.to(tl.int64) * width + column, tl.sum(value, 0), mask=column < width)


@jit
def _sum_tiles_kernel(  # type: ignore[no-untyped-def]
    partial,
    offsets,
    out,
    width,
    num_experts,
    DOUBLE: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    acc: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    own = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    expert = tl.arange(0, EXPERTS)
    end = tl.load(offsets + expert, mask=expert < num_experts, other=0)
    start = tl.load(offsets + expert - 1, mask=(expert > 0) & (expert < num_experts), other=0)
    tiles = tl.where(expert < num_experts, (end - start + TILE_ROWS - 1) // TILE_ROWS, 0)
    first = tl.sum(tl.where(expert < own, tiles, 0), 0)
    last = first + tl.sum(tl.where(expert == own, tiles, 0), 0)
    total = tl.zeros((16, COLUMNS), acc)
    for tile in range(first, last, 16):
        line = tile + tl.arange(0, 16)
        mask = (line < last)[:, None] & (column < width)[None, :]
        total += tl.load(partial + line.to(tl.int64)[:, None] * width + column[None, :], mask=mask, other=0)
    tl.store(out + own.to(tl.int64) * width + column, tl.sum(total, 0), mask=column < width)
