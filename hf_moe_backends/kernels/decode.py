"""A handful of tokens without gradients, as decoding has them: no sort, no grouped product, two launches.

Each routed pair reads its expert's weights once, and reading them is all the time there is. Past a few dozen pairs,
pairs begin to share experts, and the grouped products read less. Weights that are stored (in, out) are not served:
read by columns they took twice as long as the grouped products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_moe_backends.kernels.gates import Formula, constants, gate_value, known_formula
from hf_moe_backends.kernels.layer import is_plain
from hf_moe_backends.kernels.triton_or_none import cdiv, jit, tl, use_triton

MOST_PAIRS = 64
"""Routed pairs up to which this is the faster way, and no more than there are experts: from there on they share them.

Measured on an H200: `benchmarks/README.md`.
"""


def serves(x: Tensor, ids: Tensor, num_experts: int, *others: Tensor | None) -> bool:
    """Whether these operands are few, on a device with Triton, and need no gradient."""
    if ids.numel() > min(MOST_PAIRS, num_experts) or not use_triton(x):
        return False
    return not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *others)))


def run(*arguments: Any) -> Tensor:
    """The output of `layer.experts_layer`, from the same arguments but `transposed`."""
    out: Tensor = (_forward if is_plain(arguments[0]) else experts_decode)(*arguments)
    return out


def _forward(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    interleaved: bool,
    gate: str,
    limit: float,
    alpha: float,
) -> Tensor:
    return _decode(x, ids, weights, up, up_bias, down, down_bias, interleaved, known_formula(gate, limit, alpha))


experts_decode = torch.library.custom_op("hf_moe_backends::experts_decode", _forward, mutates_args=())


@experts_decode.register_fake
def _(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
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
    interleaved: bool,
    gate: Formula,
) -> Tensor:
    (tokens, top_k), hidden = ids.shape, x.shape[1]
    num_experts, width = down.shape[0], down.shape[2]
    activation = x.new_empty(tokens * top_k, width)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    x, up, down = (t.contiguous() for t in (x, up, down))
    # Tiles that follow the stored rows: 512 bytes of each of 8.
    shape = {"COLUMNS": 8, "DEPTH": 256, "num_warps": 4}
    _up_kernel[(tokens * top_k, cdiv(width, shape["COLUMNS"]))](
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
        HAS_BIAS=up_bias is not None,
        **constants(gate, interleaved, x),
        **shape,
    )
    _down_kernel[(tokens, cdiv(hidden, shape["COLUMNS"]))](
        activation,
        ids,
        weights,
        down,
        down_bias,
        out,
        width,
        hidden,
        num_experts,
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
    expert = expert.to(tl.int64)
    columns = 2 * width if GATED else width
    own = up + expert * hidden * columns
    own_bias = bias
    if HAS_BIAS:
        own_bias += expert * columns
    source = x + (pair // top_k).to(tl.int64) * hidden
    if GATED and INTERLEAVED:
        both_column = tl.program_id(1) * 2 * COLUMNS + tl.arange(0, 2 * COLUMNS)
        both = _product(source, own, own_bias, both_column, 2 * width, hidden, acc, HAS_BIAS, DEPTH)
        gate_sum, up_sum = tl.split(tl.reshape(both, (COLUMNS, 2)))
    else:
        gate_sum = _product(source, own, own_bias, column, width, hidden, acc, HAS_BIAS, DEPTH)
        up_sum = gate_sum
        if GATED:
            if HAS_BIAS:
                own_bias += width
            own += width * hidden
            up_sum = _product(source, own, own_bias, column, width, hidden, acc, HAS_BIAS, DEPTH)
    value, _, _ = gate_value(gate_sum, up_sum, ACTIVATION, GATED, CLAMP, PLUS, LIMIT, ALPHA)
    value *= tl.load(weights + pair).to(acc)
    tl.store(activation + pair * width + column, value.to(activation.dtype.element_ty), mask=inside)


@jit
def _product(  # type: ignore[no-untyped-def]
    source,
    matrix,
    bias,
    column,
    width,
    depth,
    acc: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One row times some columns of a matrix stored (width, depth), plus the bias there."""
    inside = column < width
    total = tl.zeros((column.shape[0], DEPTH), acc)
    for start in range(0, depth, DEPTH):
        a = start + tl.arange(0, DEPTH)
        value = tl.load(source + a, mask=a < depth, other=0).to(acc)
        mask = inside[:, None] & (a < depth)[None, :]
        place = column.to(tl.int64)[:, None] * depth + a[None, :]
        total += value[None, :] * tl.load(matrix + place, mask=mask, other=0).to(acc)
    out = tl.sum(total, 1)
    if HAS_BIAS:
        out += tl.load(bias + column, mask=inside, other=0).to(acc)
    return out


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
            row = _product(
                activation + pair * width,
                down + expert * hidden * width,
                bias,
                column,
                hidden,
                width,
                acc,
                False,
                DEPTH,
            )
            if HAS_BIAS:
                share = tl.load(weights + pair).to(acc)
                row += share * tl.load(bias + expert * hidden + column, mask=inside, other=0).to(acc)
            total += row
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=inside)
