"""A handful of tokens without gradients, as decoding has them: no sort, no grouped product, two launches.

Each routed pair reads its expert's weights once, and reading them is all the time there is. Past a few dozen pairs,
pairs begin to share experts, and the grouped products read less.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_moe_backends.kernels.gates import Formula, constants, gate_value, known_formula
from hf_moe_backends.kernels.triton_or_none import cdiv, jit, tl, use_triton

MOST_PAIRS = 64
"""Routed pairs up to which this is the faster way (measured on an H200: `benchmarks/README.md`)."""


def serves(x: Tensor, ids: Tensor, *operands: Tensor | None) -> bool:
    """Whether these operands are few, on a device with Triton, and need no gradient."""
    if ids.numel() > MOST_PAIRS or not use_triton(x):
        return False
    return not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *operands)))


@torch.library.custom_op("hf_moe_backends::experts_decode", mutates_args=())
def experts_decode(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    transposed: bool,
    interleaved: bool,
    gate: str,
    limit: float,
    alpha: float,
) -> Tensor:
    """The output of `layer.experts_layer`, from the same arguments."""
    return _decode(
        x, ids, weights, up, up_bias, down, down_bias, transposed, interleaved, known_formula(gate, limit, alpha)
    )


@experts_decode.register_fake
def _(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    transposed: bool,
    interleaved: bool,
    gate: str,
    limit: float,
    alpha: float,
) -> Tensor:
    return torch.empty_like(x)


def _decode(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    transposed: bool,
    interleaved: bool,
    gate: Formula,
) -> Tensor:
    (tokens, top_k), hidden = ids.shape, x.shape[1]
    num_experts, width = down.shape[0], down.shape[1 if transposed else 2]
    activation = x.new_empty(tokens * top_k, width)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
    # Weights are read along their rows in memory, 512 bytes of one or 64 of several at a time.
    columns, depth = (32, 64) if transposed else (8, 256)
    # (E, in, out), whatever the layout
    up_strides = up.stride() if transposed else (up.stride(0), up.stride(2), up.stride(1))
    down_strides = down.stride() if transposed else (down.stride(0), down.stride(2), down.stride(1))
    shape = {"COLUMNS": columns, "DEPTH": depth, "num_warps": 4}
    _up_kernel[(tokens * top_k, cdiv(width, columns))](
        x,
        ids,
        weights,
        up,
        up_bias,
        activation,
        hidden,
        width,
        num_experts,
        top_k,
        *up_strides,
        HAS_BIAS=up_bias is not None,
        **constants(gate, interleaved, x),
        **shape,
    )
    _down_kernel[(tokens, cdiv(hidden, columns))](
        activation,
        ids,
        weights,
        down,
        down_bias,
        out,
        width,
        hidden,
        num_experts,
        *down_strides,
        TOP_K=top_k,
        HAS_BIAS=down_bias is not None,
        DOUBLE=x.dtype == torch.float64,
        **shape,
    )
    return out


@jit
def _up_kernel(  # type: ignore[no-untyped-def]
    x,
    ids,
    weights,
    up,
    bias,
    activation,
    hidden,
    width,
    num_experts,
    top_k,
    stride_e,
    stride_a,
    stride_b,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    CLAMP: tl.constexpr,
    PLUS: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    DOUBLE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """The weighted activation of one pair, at some columns."""
    acc: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    pair = tl.program_id(0)
    expert = tl.load(ids + pair)
    if (expert < 0) | (expert >= num_experts):
        return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    if GATED and INTERLEAVED:
        gate_column = 2 * column
        up_column = 2 * column + 1
    else:
        gate_column = column
        up_column = column + width if GATED else column
    expert = expert.to(tl.int64)
    base = up + expert * stride_e
    g = tl.zeros((COLUMNS, DEPTH), acc)
    u = tl.zeros((COLUMNS, DEPTH), acc)
    for start in range(0, hidden, DEPTH):
        a = start + tl.arange(0, DEPTH)
        value = tl.load(x + (pair // top_k).to(tl.int64) * hidden + a, mask=a < hidden, other=0).to(acc)
        mask = inside[:, None] & (a < hidden)[None, :]
        u += value[None, :] * tl.load(
            base + up_column[:, None] * stride_b + a[None, :] * stride_a, mask=mask, other=0
        ).to(acc)
        if GATED:
            g += value[None, :] * tl.load(
                base + gate_column[:, None] * stride_b + a[None, :] * stride_a, mask=mask, other=0
            ).to(acc)
    up_sum = tl.sum(u, 1)
    gate_sum = tl.sum(g, 1) if GATED else up_sum
    if HAS_BIAS:
        own = bias + expert * (2 * width if GATED else width)
        if GATED:
            gate_sum += tl.load(own + gate_column, mask=inside, other=0).to(acc)
            up_sum += tl.load(own + up_column, mask=inside, other=0).to(acc)
        else:
            up_sum += tl.load(own + up_column, mask=inside, other=0).to(acc)
            gate_sum = up_sum
    value, _, _ = gate_value(gate_sum, up_sum, ACTIVATION, GATED, CLAMP, PLUS, LIMIT, ALPHA)
    value *= tl.load(weights + pair).to(acc)
    tl.store(activation + pair * width + column, value.to(activation.dtype.element_ty), mask=inside)


@jit
def _down_kernel(  # type: ignore[no-untyped-def]
    activation,
    ids,
    weights,
    down,
    bias,
    out,
    width,
    hidden,
    num_experts,
    stride_e,
    stride_a,
    stride_b,
    TOP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DOUBLE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One token's output at some columns: the sum over its pairs, in the order of its slots."""
    acc: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    token = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < hidden
    total = tl.zeros((COLUMNS,), acc)
    for slot in range(TOP_K):
        pair = token * TOP_K + slot
        expert = tl.load(ids + pair)
        if (expert >= 0) & (expert < num_experts):
            expert = expert.to(tl.int64)
            product = tl.zeros((COLUMNS, DEPTH), acc)
            for start in range(0, width, DEPTH):
                a = start + tl.arange(0, DEPTH)
                value = tl.load(activation + pair * width + a, mask=a < width, other=0).to(acc)
                mask = inside[:, None] & (a < width)[None, :]
                matrix = down + expert * stride_e + column[:, None] * stride_b + a[None, :] * stride_a
                product += value[None, :] * tl.load(matrix, mask=mask, other=0).to(acc)
            row = tl.sum(product, 1)
            if HAS_BIAS:
                share = tl.load(weights + pair).to(acc)
                row += share * tl.load(bias + expert * hidden + column, mask=inside, other=0).to(acc)
            total += row
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=inside)
