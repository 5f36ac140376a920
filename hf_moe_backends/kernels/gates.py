"""What experts do between their two projections: one pass forward, one pass backward, over the known formulas.

The formulas are those of `hf_moe_backends.recognise.Gate`. All arithmetic is in the accumulator's dtype.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_moe_backends.kernels.routing import Routing
from hf_moe_backends.kernels.rows import accumulator
from hf_moe_backends.kernels.triton_or_none import cdiv, jit, next_power_of_2, tl, use_triton
from hf_moe_backends.recognise import Gate


class Formula(NamedTuple):
    """A known gate in parts: `clamp_after(act(clamp(g)), limit) * (clamp(u) + plus)`, or `act(u)` without a gate."""

    activation: str  # silu, gelu, gelu_tanh, relu, relu2
    gated: bool
    clamp: str = "none"  # none, before (g and u), after (act(g) and u)
    plus: float = 0.0
    limit: float = math.inf
    alpha: float = 1.0  # silu is x * sigmoid(alpha * x)


_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}
_GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}


def formula(gate: Gate) -> Formula | None:
    """The formula of a recognised gate, or None for a custom one."""
    if gate.formula in _ACTIVATIONS:
        return Formula(gate.formula, gated=False)
    if gate.formula in _GATED:
        return Formula(_GATED[gate.formula], gated=True)
    if gate.formula == "swiglu_clamped":
        return Formula("silu", gated=True, clamp="before", limit=gate.limit)
    if gate.formula == "swiglu_clamped_after":
        return Formula("silu", gated=True, clamp="after", limit=gate.limit)
    if gate.formula == "gpt_oss":
        return Formula("silu", gated=True, clamp="before", plus=1.0, limit=gate.limit, alpha=gate.alpha)
    return None


def known_formula(gate: str, limit: float, alpha: float) -> Formula:
    """A formula from an operator's arguments, where a limit of 0 stands for none."""
    known = formula(Gate(formula=gate, limit=limit or math.inf, alpha=alpha))
    assert known is not None
    return known


class Rows(NamedTuple):
    """What belongs to the rows besides their pre-activation."""

    routing: Routing
    ids: Tensor  # (T, K)
    weights: Tensor  # (T, K)
    bias: Tensor | None  # (E, N), of the first projection


def activate(pre: Tensor, rows: Rows, gate: Formula, interleaved: bool) -> Tensor:
    """The weighted activation of each row.

    Args:
        pre: (R, N) pre-activation without its bias, N = 2I for gated experts and I for others.
        interleaved: whether gate and up columns alternate.

    Returns:
        (R, I). Rows of nobody are unwritten on CUDA and zero elsewhere.
    """
    if use_triton(pre):
        return _activate_triton(pre, rows, gate, interleaved)
    value, share, used, _ = _read(pre, rows)
    activation, _, _ = _evaluate(*_split(value, gate, interleaved), gate)
    return (activation * share).masked_fill_(~used, 0).to(pre.dtype)


def activate_backward(
    grad: Tensor, extra: Tensor | None, pre: Tensor, rows: Rows, gate: Formula, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Everything that the backward of the layer needs of its activation, in one pass.

    Args:
        grad: (R, I), the gradient of the unweighted second projection's input.
        extra: (R,) to add to the router-weight gradient, or None.
        pre: (R, N), as in `activate`.

    Returns:
        the gradient of `pre` (R, N); the weighted activation again (R, I); the router weights' gradient (T, K) in the
        accumulator's dtype, zero for pairs of other ranks.
    """
    if use_triton(pre):
        return _backward_triton(grad, extra, pre, rows, gate, interleaved)
    value, share, used, order = _read(pre, rows)
    activation, by_gate, by_up = _evaluate(*_split(value, gate, interleaved), gate)
    incoming = grad.to(value.dtype).masked_fill(~used, 0)
    products = (incoming * activation).sum(1)
    if extra is not None:
        products += extra
    products = products.masked_fill_(~used[:, 0], 0)
    grad_weights = torch.empty_like(products).scatter_(0, order, products).view_as(rows.ids)
    incoming *= share
    weighted = (activation * share).to(pre.dtype)
    if by_gate is None:
        return (incoming * by_up).to(pre.dtype), weighted, grad_weights
    parts = incoming * by_gate, incoming * by_up
    grad_pre = torch.stack(parts, -1).flatten(1) if interleaved else torch.cat(parts, 1)
    return grad_pre.to(pre.dtype), weighted, grad_weights


def _read(pre: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The biased pre-activation and the rows' weights in the accumulator's dtype, zero in rows of nobody."""
    acc, order = accumulator(pre.dtype), rows.routing.order.long()
    used = (torch.arange(order.numel(), device=order.device) < rows.routing.offsets[-1])[:, None]
    value = pre.to(acc).masked_fill(~used, 0)
    if rows.bias is not None:
        value += rows.bias[rows.ids.reshape(-1)[order].clamp(0, rows.bias.shape[0] - 1)].to(acc)
    return value, rows.weights.reshape(-1, 1)[order].to(acc).masked_fill_(~used, 0), used, order


def _split(value: Tensor, gate: Formula, interleaved: bool) -> tuple[Tensor | None, Tensor]:
    if not gate.gated:
        return None, value
    if interleaved:
        return value[:, ::2], value[:, 1::2]
    half = value.shape[1] // 2
    return value[:, :half], value[:, half:]


def _evaluate(g: Tensor | None, u: Tensor, gate: Formula) -> tuple[Tensor, Tensor | None, Tensor]:
    """The activation and its derivatives by gate and up."""
    if g is None:
        value, slope = _activation(u, gate)
        return value, None, slope
    if gate.clamp == "before":
        value, slope = _activation(g.clamp(max=gate.limit), gate)
        slope = slope * (g <= gate.limit)
    else:
        value, slope = _activation(g, gate)
        if gate.clamp == "after":
            slope = slope * (value <= gate.limit)
            value = value.clamp(max=gate.limit)
    up, through = u, torch.ones_like(u)
    if gate.clamp != "none":
        up, through = u.clamp(-gate.limit, gate.limit), (u.abs() <= gate.limit).to(u.dtype)
    up = up + gate.plus
    return value * up, slope * up, value * through


def _activation(x: Tensor, gate: Formula) -> tuple[Tensor, Tensor]:
    """The value and the slope."""
    if gate.activation == "silu":
        s = torch.sigmoid(gate.alpha * x)
        return x * s, s * (1 + gate.alpha * x * (1 - s))
    if gate.activation == "gelu":
        half = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
        return x * half, half + x * torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    if gate.activation == "gelu_tanh":
        c, d = math.sqrt(2 / math.pi), 0.044715
        t = torch.tanh(c * (x + d * x * x * x))
        return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * d * x * x)
    rectified = F.relu(x)
    if gate.activation == "relu":
        return rectified, (x > 0).to(x.dtype)
    return rectified * rectified, 2 * rectified


_ROWS, _COLUMNS = 8, 256
"""A program's tile: 2048 elements of each operand, 16 a thread, in whole 512-byte lines."""


def _tile(width: int) -> int:
    return min(next_power_of_2(width), _COLUMNS)


def constants(gate: Formula, interleaved: bool, pre: Tensor) -> dict[str, Any]:
    """The compile-time constants of a kernel that evaluates a gate."""
    return {
        "ACTIVATION": _ACTIVATIONS[gate.activation],
        "GATED": gate.gated,
        "CLAMP": gate.clamp,
        "PLUS": gate.plus,
        # constants of the code and no arguments: Triton would round an argument to float32
        "LIMIT": gate.limit if gate.clamp != "none" else 0.0,
        "ALPHA": gate.alpha,
        "INTERLEAVED": interleaved,
        "DOUBLE": pre.dtype == torch.float64,
    }


def _activate_triton(pre: Tensor, rows: Rows, gate: Formula, interleaved: bool) -> Tensor:
    size, width = pre.shape[0], pre.shape[1] // (2 if gate.gated else 1)
    out = pre.new_empty(size, width)
    if out.numel():
        _activate_kernel[(cdiv(size, _ROWS), cdiv(width, _tile(width)))](
            pre,
            rows.bias,
            rows.ids,
            rows.weights,
            rows.routing.order,
            rows.routing.offsets,
            out,
            width,
            rows.routing.offsets.numel(),
            HAS_BIAS=rows.bias is not None,
            ROWS=_ROWS,
            COLUMNS=_tile(width),
            num_warps=4,
            **constants(gate, interleaved, pre),
        )
    return out


@jit
def _activate_kernel(  # type: ignore[no-untyped-def]
    pre,
    bias,
    ids,
    weights,
    order,
    offsets,
    out,
    width,
    num_experts,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    CLAMP: tl.constexpr,
    PLUS: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    DOUBLE: tl.constexpr,
):
    acc: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    end = tl.load(offsets + num_experts - 1)
    if tl.program_id(0) * ROWS >= end:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used = row < end
    pair = tl.load(order + row, mask=used, other=0)
    expert = tl.load(ids + pair, mask=used, other=0).to(tl.int64)
    share = tl.load(weights + pair, mask=used, other=0).to(acc)
    row = row.to(tl.int64)
    start = tl.program_id(1) * COLUMNS
    g, u = _load_pair(pre, bias, row, expert, used, start, width, acc, HAS_BIAS, COLUMNS, GATED, INTERLEAVED)
    value, _, _ = gate_value(g, u, ACTIVATION, GATED, CLAMP, PLUS, LIMIT, ALPHA)
    column = start + tl.arange(0, COLUMNS)
    mask = used[:, None] & (column < width)[None, :]
    value = (value * share[:, None]).to(out.dtype.element_ty)
    tl.store(out + row[:, None] * width + column[None, :], value, mask=mask)


def _backward_triton(
    grad: Tensor, extra: Tensor | None, pre: Tensor, rows: Rows, gate: Formula, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    size, width = grad.shape
    grad_pre, weighted = torch.empty_like(pre), torch.empty_like(grad)
    grad_weights = rows.weights.new_zeros(rows.weights.shape, dtype=accumulator(pre.dtype))
    if grad.numel():
        _backward_kernel[(cdiv(size, _ROWS),)](
            grad,
            extra,
            pre,
            rows.bias,
            rows.ids,
            rows.weights,
            rows.routing.order,
            rows.routing.offsets,
            grad_pre,
            weighted,
            grad_weights,
            width,
            rows.routing.offsets.numel(),
            HAS_BIAS=rows.bias is not None,
            HAS_EXTRA=extra is not None,
            ROWS=_ROWS,
            COLUMNS=_tile(width),
            num_warps=4,
            **constants(gate, interleaved, pre),
        )
    return grad_pre, weighted, grad_weights


@jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    grad,
    extra,
    pre,
    bias,
    ids,
    weights,
    order,
    offsets,
    grad_pre,
    weighted,
    grad_weights,
    width,
    num_experts,
    HAS_BIAS: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    CLAMP: tl.constexpr,
    PLUS: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    DOUBLE: tl.constexpr,
):
    acc: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    end = tl.load(offsets + num_experts - 1)
    if tl.program_id(0) * ROWS >= end:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used = row < end
    pair = tl.load(order + row, mask=used, other=0)
    expert = tl.load(ids + pair, mask=used, other=0).to(tl.int64)
    share = tl.load(weights + pair, mask=used, other=0).to(acc)
    row = row.to(tl.int64)
    # A row's columns are summed in a fixed order: chunk after chunk into one running total a column, then across.
    total = tl.zeros((ROWS, COLUMNS), acc)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = used[:, None] & (column < width)[None, :]
        here = row[:, None] * width + column[None, :]
        g, u = _load_pair(pre, bias, row, expert, used, start, width, acc, HAS_BIAS, COLUMNS, GATED, INTERLEAVED)
        value, by_gate, by_up = gate_value(g, u, ACTIVATION, GATED, CLAMP, PLUS, LIMIT, ALPHA)
        incoming = tl.load(grad + here, mask=mask, other=0).to(acc)
        total += tl.where(mask, incoming * value, 0)
        tl.store(weighted + here, (value * share[:, None]).to(weighted.dtype.element_ty), mask=mask)
        incoming *= share[:, None]
        _store_pair(
            grad_pre, incoming * by_gate, incoming * by_up, row, used, start, width, COLUMNS, GATED, INTERLEAVED
        )
    product = tl.sum(total, 1)
    if HAS_EXTRA:
        product += tl.load(extra + row, mask=used, other=0)
    tl.store(grad_weights + pair, product, mask=used)


@jit
def _load_pair(  # type: ignore[no-untyped-def]
    pre,
    bias,
    row,
    expert,
    used,
    start,
    width,
    acc: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Gate and up at columns start.. of each row, (ROWS, COLUMNS) each; the same twice for experts without a gate."""
    if GATED and INTERLEAVED:
        # neighbours in memory are read together, 16 bytes a thread, and parted in registers
        column = 2 * start + tl.arange(0, 2 * COLUMNS)
        mask = used[:, None] & (column < 2 * width)[None, :]
        both = tl.load(pre + row[:, None] * (2 * width) + column[None, :], mask=mask, other=0).to(acc)
        if HAS_BIAS:
            both += tl.load(bias + expert[:, None] * (2 * width) + column[None, :], mask=mask, other=0).to(acc)
        g, u = tl.split(tl.reshape(both, (both.shape[0], COLUMNS, 2)))
    else:
        column = start + tl.arange(0, COLUMNS)
        mask = used[:, None] & (column < width)[None, :]
        stride = 2 * width if GATED else width
        g = tl.load(pre + row[:, None] * stride + column[None, :], mask=mask, other=0).to(acc)
        if HAS_BIAS:
            g += tl.load(bias + expert[:, None] * stride + column[None, :], mask=mask, other=0).to(acc)
        u = g
        if GATED:
            u = tl.load(pre + row[:, None] * stride + width + column[None, :], mask=mask, other=0).to(acc)
            if HAS_BIAS:
                u += tl.load(bias + expert[:, None] * stride + width + column[None, :], mask=mask, other=0).to(acc)
    return g, u


@jit
def _store_pair(  # type: ignore[no-untyped-def]
    target,
    g,
    u,
    row,
    used,
    start,
    width,
    COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    kind = target.dtype.element_ty
    if GATED and INTERLEAVED:
        column = 2 * start + tl.arange(0, 2 * COLUMNS)
        mask = used[:, None] & (column < 2 * width)[None, :]
        both = tl.reshape(tl.join(g, u), (g.shape[0], 2 * COLUMNS))
        tl.store(target + row[:, None] * (2 * width) + column[None, :], both.to(kind), mask=mask)
    else:
        column = start + tl.arange(0, COLUMNS)
        mask = used[:, None] & (column < width)[None, :]
        stride = 2 * width if GATED else width
        if GATED:
            tl.store(target + row[:, None] * stride + column[None, :], g.to(kind), mask=mask)
            tl.store(target + row[:, None] * stride + width + column[None, :], u.to(kind), mask=mask)
        else:
            tl.store(target + row[:, None] * stride + column[None, :], u.to(kind), mask=mask)


@jit
def gate_value(  # type: ignore[no-untyped-def]
    g,
    u,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    CLAMP: tl.constexpr,
    PLUS: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
):
    """The activation and its derivatives by gate and up, as `_evaluate` computes them."""
    x = g
    if CLAMP == "before":
        x = tl.where(g > LIMIT, LIMIT, g)  # and not minimum: a NaN stays one
    if ACTIVATION == 0:
        s = 1 / (1 + tl.exp(-ALPHA * x))
        value = x * s
        slope = s * (1 + ALPHA * x * (1 - s))
    elif ACTIVATION == 1:
        half = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        value = x * half
        slope = half + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif ACTIVATION == 2:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        t = 2 / (1 + tl.exp(-2 * inner)) - 1
        value = 0.5 * x * (1 + t)
        slope = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.7978845608028654 * (1 + 0.134145 * x * x)
    else:
        rectified = tl.where(x < 0, 0.0, x)
        if ACTIVATION == 3:
            value = rectified
            slope = tl.where(x > 0, 1.0, 0.0).to(x.dtype)
        else:
            value = rectified * rectified
            slope = 2 * rectified
    if not GATED:
        return value, slope, slope
    up = u
    through = tl.full(u.shape, 1.0, u.dtype)
    if CLAMP == "before":
        slope = tl.where(g > LIMIT, 0.0, slope)
    if CLAMP == "after":
        slope = tl.where(value > LIMIT, 0.0, slope)
        value = tl.where(value > LIMIT, LIMIT, value)
    if CLAMP != "none":
        up = tl.where(u > LIMIT, LIMIT, tl.where(u < -LIMIT, -LIMIT, u))
        through = tl.where((u > LIMIT) | (u < -LIMIT), 0.0, through)
    up += PLUS
    return value * up, slope * up, value * through
