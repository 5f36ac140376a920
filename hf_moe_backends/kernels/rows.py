"""Tokens to rows and back: gather, the weighted sum of a token's rows, and the gradients of both."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_moe_backends.kernels.routing import Routing
from hf_moe_backends.kernels.triton_or_none import cdiv, jit, next_power_of_2, tl, use_triton


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What sums of this dtype are held in: float32, and float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def gather(
    tokens: Tensor, routing: Routing, top_k: int, ids: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Each row's token, and with `bias` its product with the bias of the row's expert.

    Args:
        tokens: (T, H).
        ids: (T, K), needed with `bias`.
        bias: (E, H).

    Returns:
        (R, H), and (R,) in the accumulator's dtype or None. Rows of nobody are unwritten on CUDA and zero elsewhere.
    """
    if use_triton(tokens):
        return _gather_triton(tokens, routing, top_k, ids, bias)
    used = _used_rows(routing)
    rows = tokens[routing.order // top_k].masked_fill_(~used[:, None], 0)
    if bias is None or ids is None:
        return rows, None
    acc = accumulator(tokens.dtype)
    return rows, (rows.to(acc) * bias[_row_experts(ids, routing, bias.shape[0])].to(acc)).sum(1)


def weighted_sum(
    rows: Tensor, routing: Routing, ids: Tensor, *, weights: Tensor | None, bias: Tensor | None, weigh_rows: bool
) -> Tensor:
    """Each token's rows, summed in the order of its slots.

    Args:
        rows: (R, H).
        ids: (T, K).
        weights: (T, K), or None for a plain sum.
        bias: (E, H), added to each row before it is weighted.
        weigh_rows: whether the rows are still to be weighted. The bias always is.

    Returns:
        (T, H) in the dtype of `rows`.
    """
    if use_triton(rows):
        return _weighted_sum_triton(rows, routing, ids, weights, bias, weigh_rows)
    acc = accumulator(rows.dtype)
    used = (routing.position >= 0)[:, None]
    chosen = rows[routing.position.clamp(min=0)].to(acc).masked_fill_(~used, 0)
    if weights is not None:
        share = weights.reshape(-1, 1).to(acc).masked_fill(~used, 0)
        if weigh_rows:
            chosen = chosen.mul_(share)
        if bias is not None:
            chosen = chosen.add_(bias[ids.reshape(-1).clamp(0, bias.shape[0] - 1)].to(acc) * share)
    return chosen.view(*ids.shape, rows.shape[1]).sum(1).to(rows.dtype)


def weighted_sum_backward(grad: Tensor, rows: Tensor, routing: Routing, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `weighted_sum(rows, weights=weights, weigh_rows=True)` in rows and weights.

    Args:
        grad: (T, H).

    Returns:
        (R, H), zero in rows of nobody, and (T, K) in the accumulator's dtype.
    """
    if use_triton(rows):
        return _weighted_sum_backward_triton(grad, rows, routing, weights)
    acc = accumulator(rows.dtype)
    used = _used_rows(routing)
    order = routing.order.long()
    spread = grad[order // weights.shape[1]].to(acc).masked_fill_(~used[:, None], 0)
    shares = weights.reshape(-1, 1)[order].to(acc).masked_fill_(~used[:, None], 0)
    grad_rows = (spread * shares).to(rows.dtype)
    products = (spread * rows.to(acc).masked_fill(~used[:, None], 0)).sum(1)
    # here `order` names every pair once; the rows of nobody give their pairs zero
    return grad_rows, torch.empty_like(products).scatter_(0, order, products).view_as(weights)


def _used_rows(routing: Routing) -> Tensor:
    return torch.arange(routing.order.numel(), device=routing.order.device) < routing.offsets[-1]


def _row_experts(ids: Tensor, routing: Routing, num_experts: int) -> Tensor:
    return ids.reshape(-1)[routing.order.long()].clamp(0, num_experts - 1)


_WARPS = 4


def _columns(width: int) -> int:
    """Columns a program handles at a time: the most of those that leave the fewest idle (2880 is 3 x 1024 - 192)."""
    choices = [columns for columns in (2048, 1024, 512) if columns <= width] or [next_power_of_2(width)]
    return min(choices, key=lambda columns: cdiv(width, columns) * columns)


def _gather_triton(
    tokens: Tensor, routing: Routing, top_k: int, ids: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    size, width = routing.order.numel(), tokens.shape[1]
    tokens = tokens.contiguous()
    rows = tokens.new_empty(size, width)
    product = tokens.new_empty(size, dtype=accumulator(tokens.dtype)) if bias is not None else None
    if rows.numel():
        _gather_kernel[(tokens.shape[0],)](
            tokens,
            routing.position,
            ids,
            bias,
            rows,
            product,
            width,
            TOP_K=top_k,
            HAS_BIAS=bias is not None,
            DOUBLE=tokens.dtype == torch.float64,
            COLUMNS=_columns(width),
            num_warps=_WARPS,
        )
    return rows, product


@jit
def _gather_kernel(  # type: ignore[no-untyped-def]
    tokens,
    position,
    ids,
    bias,
    rows,
    product,
    width,
    TOP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DOUBLE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One token into all of its rows: it is read once, where a program a row would read it from memory K times."""
    acc: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    token = tl.program_id(0).to(tl.int64)
    source = tokens + token * width
    if HAS_BIAS:
        for slot in tl.static_range(TOP_K):
            row = tl.load(position + token * TOP_K + slot).to(tl.int64)
            own = bias + tl.load(ids + token * TOP_K + slot).to(tl.int64) * width
            total = tl.zeros((COLUMNS,), acc)
            for start in range(0, width, COLUMNS):
                column = start + tl.arange(0, COLUMNS)
                mask = (column < width) & (row >= 0)
                value = tl.load(source + column, mask=mask, other=0).to(acc)
                total += value * tl.load(own + column, mask=mask, other=0).to(acc)
            tl.store(product + row, tl.sum(total, 0), mask=row >= 0)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        value = tl.load(source + column, mask=column < width, other=0)
        for slot in tl.static_range(TOP_K):
            row = tl.load(position + token * TOP_K + slot).to(tl.int64)
            tl.store(rows + row * width + column, value, mask=(column < width) & (row >= 0))


def _weighted_sum_triton(
    rows: Tensor, routing: Routing, ids: Tensor, weights: Tensor | None, bias: Tensor | None, weigh_rows: bool
) -> Tensor:
    (num_tokens, top_k), width = ids.shape, rows.shape[1]
    out = rows.new_empty(num_tokens, width)
    if out.numel():
        columns = _columns(width)
        _weighted_sum_kernel[(num_tokens, cdiv(width, columns))](
            rows,
            routing.position,
            ids,
            weights,
            bias,
            out,
            width,
            top_k,
            WEIGH_ROWS=weigh_rows and weights is not None,
            HAS_BIAS=bias is not None,
            DOUBLE=rows.dtype == torch.float64,
            COLUMNS=columns,
            num_warps=_WARPS,
        )
    return out


@jit
def _weighted_sum_kernel(  # type: ignore[no-untyped-def]
    rows,
    position,
    ids,
    weights,
    bias,
    out,
    width,
    top_k: tl.constexpr,
    WEIGH_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DOUBLE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    acc: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), acc)
    for slot in tl.static_range(top_k):
        pair = token * top_k + slot
        row = tl.load(position + pair).to(tl.int64)
        mask = (column < width) & (row >= 0)
        value = tl.load(rows + row * width + column, mask=mask, other=0).to(acc)
        if WEIGH_ROWS:
            value *= tl.where(row >= 0, tl.load(weights + pair).to(acc), 0)
        if HAS_BIAS:
            expert = tl.load(ids + pair).to(tl.int64)
            value += tl.load(weights + pair).to(acc) * tl.load(bias + expert * width + column, mask=mask, other=0).to(
                acc
            )
        total += value
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=column < width)


def _weighted_sum_backward_triton(
    grad: Tensor, rows: Tensor, routing: Routing, weights: Tensor
) -> tuple[Tensor, Tensor]:
    size, width = rows.shape
    grad_rows = torch.empty_like(rows)
    grad_weights = weights.new_zeros(weights.shape, dtype=accumulator(rows.dtype))
    if rows.numel():
        _weighted_sum_backward_kernel[(size,)](
            grad.contiguous(),
            rows,
            weights,
            routing.order,
            routing.offsets,
            grad_rows,
            grad_weights,
            width,
            routing.offsets.numel(),
            weights.shape[1],
            DOUBLE=rows.dtype == torch.float64,
            COLUMNS=_columns(width),
            num_warps=_WARPS,
        )
    return grad_rows, grad_weights


@jit
def _weighted_sum_backward_kernel(  # type: ignore[no-untyped-def]
    grad,
    rows,
    weights,
    order,
    offsets,
    grad_rows,
    grad_weights,
    width,
    num_experts,
    top_k,
    DOUBLE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    acc: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    row = tl.program_id(0)
    used = row < tl.load(offsets + num_experts - 1)
    pair = tl.load(order + row)
    weight = tl.load(weights + pair, mask=used, other=0).to(acc)
    source = grad + (pair // top_k).to(tl.int64) * width
    here = row.to(tl.int64) * width
    total = tl.zeros((COLUMNS,), acc)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = (column < width) & used
        value = tl.load(source + column, mask=mask, other=0).to(acc)
        total += value * tl.load(rows + here + column, mask=mask, other=0).to(acc)
        tl.store(grad_rows + here + column, (value * weight).to(grad_rows.dtype.element_ty), mask=column < width)
    tl.store(grad_weights + pair, tl.sum(total, 0), mask=used)
