"""Cross entropy of rows of logits whose gradient is written where the logits were."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_moe_backends.kernels.rows import accumulator
from hf_moe_backends.kernels.triton_or_none import jit, next_power_of_2, tl, use_triton


def cross_entropy_(
    logits: Tensor,
    labels: Tensor,
    *,
    gradient: bool,
    ignore_index: int,
    scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Each row's loss, the cross entropy of `softcap * tanh(scale * logits / softcap)`, or of `scale * logits`.

    Args:
        logits: (R, V) contiguous.
        labels: (R,) int64.
        gradient: whether to overwrite the logits with the gradient of the losses' sum.

    Returns:
        (R,) in the accumulator's dtype, zero where the label is `ignore_index`.
    """
    if use_triton(logits):
        return _cross_entropy_triton(logits, labels, gradient, ignore_index, scale, softcap)
    acc = accumulator(logits.dtype)
    counts = labels != ignore_index
    chosen = labels.where(counts, 0)[:, None]
    value = logits.to(acc) * scale
    slope: Tensor | float = scale
    if softcap is not None:
        capped = torch.tanh(value / softcap)
        slope = scale * (1 - capped * capped)
        value = softcap * capped
    normaliser = value.logsumexp(1, keepdim=True)
    losses = (normaliser - value.gather(1, chosen))[:, 0].masked_fill(~counts, 0)
    if gradient:
        grad = (value - normaliser).exp_()
        grad.scatter_add_(1, chosen, grad.new_full(chosen.shape, -1))
        grad *= slope
        logits.copy_(grad.masked_fill_(~counts[:, None], 0))
    return losses


def _cross_entropy_triton(
    logits: Tensor, labels: Tensor, gradient: bool, ignore_index: int, scale: float, softcap: float | None
) -> Tensor:
    losses = logits.new_empty(logits.shape[0], dtype=accumulator(logits.dtype))
    if logits.shape[0]:
        block = min(4096, next_power_of_2(logits.shape[1]))
        _cross_entropy_kernel[(logits.shape[0],)](
            logits,
            labels,
            losses,
            logits.shape[1],
            ignore_index,
            SCALE=scale,
            SOFTCAP=softcap or 0.0,
            GRADIENT=gradient,
            BLOCK=block,
            num_warps=8,
        )
    return losses


@jit
def _value(x: Any, SCALE: tl.constexpr, SOFTCAP: tl.constexpr) -> Any:
    """The value that enters the softmax, and its slope."""
    if SOFTCAP == 0:
        return x * SCALE, x * 0 + SCALE
    t = _tanh(x * (SCALE / SOFTCAP))
    return SOFTCAP * t, SCALE * (1 - t * t)


@jit
def _tanh(x: Any) -> Any:
    # without the cancellation of (1 - e) / (1 + e) near zero
    square = x * x
    near = x * (1 - square * (1.0 / 3 - square * (2.0 / 15 - square * (17.0 / 315 - square * 62.0 / 2835))))
    e = tl.exp(-2 * tl.abs(x))
    far = (1 - e) / (1 + e)
    return tl.where(tl.abs(x) < 0.1, near, tl.where(x < 0, -far, far))


@jit
def _cross_entropy_kernel(
    logits: Any,
    labels: Any,
    losses: Any,
    columns: Any,
    ignore_index: Any,
    SCALE: tl.constexpr,  # a constant, since a float argument has 32 bits
    SOFTCAP: tl.constexpr,  # 0 for none
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    label = tl.load(labels + row)
    acc = losses.dtype.element_ty
    inside = tl.arange(0, BLOCK)
    if label == ignore_index:
        tl.store(losses + row, tl.zeros((), acc))
        if GRADIENT:
            for start in range(0, columns, BLOCK):
                column = start + inside
                tl.store(logits + column, tl.zeros((BLOCK,), logits.dtype.element_ty), mask=column < columns)
    else:
        top = tl.full((), float("-inf"), acc)
        total = tl.zeros((), acc)
        for start in range(0, columns, BLOCK):
            column = start + inside
            x = tl.load(logits + column, mask=column < columns, other=0).to(acc)
            value, _ = _value(x, SCALE, SOFTCAP)
            value = tl.where(column < columns, value, float("-inf"))
            highest = tl.maximum(top, tl.max(value, 0))
            total = total * tl.exp(top - highest) + tl.sum(tl.exp(value - highest), 0)
            top = highest
        normaliser = top + tl.log(total)
        chosen, _ = _value(tl.load(logits + label).to(acc), SCALE, SOFTCAP)
        tl.store(losses + row, normaliser - chosen)
        if GRADIENT:
            for start in range(0, columns, BLOCK):
                column = start + inside
                x = tl.load(logits + column, mask=column < columns, other=0).to(acc)
                value, slope = _value(x, SCALE, SOFTCAP)
                grad = tl.exp(value - normaliser) - tl.where(column == label, 1.0, 0.0).to(acc)
                tl.store(logits + column, (grad * slope).to(logits.dtype.element_ty), mask=column < columns)
