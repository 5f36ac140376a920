"""`loss="chunked"`: the output head and its cross entropy together, on some tokens at a time.

Forward computes the gradients as well, so that no logits are kept for backward (the way of Liger's fused linear cross
entropy, https://arxiv.org/abs/2410.10989): the products are as many as without fusion, three.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_moe_backends.kernels.cross_entropy import cross_entropy_
from hf_moe_backends.kernels.rows import accumulator
from hf_moe_backends.spec import FusedLoss


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None,
    ignore_index: int,
    num_items: Tensor | int | None,
    scale: float,
    softcap: float | None,
    chunk: int,
) -> Tensor:
    """`FusedLoss`'s contract. `chunk` tokens' logits exist at a time: `chunk * V` elements."""
    if chunk < 1:
        raise ValueError(f"loss.chunked.chunk={chunk} must be at least 1 token")
    acc = accumulator(hidden.dtype)
    count: Any = (labels != ignore_index).sum() if num_items is None else num_items
    share = 1 / torch.as_tensor(count, device=hidden.device).to(acc).reshape(())
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, labels, share, ignore_index, scale, softcap, chunk)  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        share: Tensor,
        ignore_index: int,
        scale: float,
        softcap: float | None,
        chunk: int,
    ) -> Tensor:
        by_hidden, by_weight, by_bias = ctx.needs_input_grad[:3]
        learns = by_hidden or by_weight or by_bias
        grad_hidden = torch.empty_like(hidden) if by_hidden else None
        # the first chunk's product fills it, if there is a chunk
        new_like = torch.empty_like if len(hidden) else torch.zeros_like
        grad_weight = new_like(weight) if by_weight else None
        grad_bias = weight.new_zeros(weight.shape[0], dtype=share.dtype) if by_bias else None
        losses = []
        for start in range(0, hidden.shape[0], chunk):
            here = slice(start, start + chunk)
            rows = hidden[here]
            logits = rows @ weight.t() if bias is None else torch.addmm(bias, rows, weight.t())
            losses.append(
                cross_entropy_(
                    logits,
                    labels[here],
                    gradient=learns,
                    ignore_index=ignore_index,
                    scale=scale,
                    softcap=softcap,
                )
            )
            if grad_hidden is not None:
                torch.mm(logits, weight, out=grad_hidden[here])
            if grad_weight is not None:
                grad_weight.addmm_(logits.t(), rows, beta=1 if start else 0)
            if grad_bias is not None:
                grad_bias += logits.sum(0, dtype=grad_bias.dtype)
            del logits  # before the next chunk's are made
        # after the products: a logit's share of the mean is too small for float16
        ctx.share = torch.where(share.isinf(), 0, share)
        ctx.gradients = grad_hidden, grad_weight, None if grad_bias is None else grad_bias.to(weight.dtype)
        total = torch.cat(losses).sum() if losses else share.new_zeros(())
        return total * share

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("backward of loss='chunked' ran a second time without retain_graph=True the first time")
        gradients = ctx.gradients
        by = grad * ctx.share
        if torch._C._autograd._get_current_graph_task_keep_graph():
            gradients = tuple(None if g is None else (g * by).to(g.dtype) for g in gradients)
        else:  # in place, since the weight's gradient is as large as the weight
            ctx.gradients = None
            for g in gradients:
                if g is not None:
                    g.mul_(by)
        return (*gradients, None, None, None, None, None, None)


chunked = FusedLoss(function=linear_cross_entropy)
