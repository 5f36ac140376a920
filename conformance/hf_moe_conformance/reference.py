"""What each kind must compute, written from the formula in float64. Shares no code with what it judges.

Nothing is sorted, gathered, fused or skipped here: experts run on every token, attention over every key. That is slow
and has nowhere to go wrong. Gradients are autograd's.

T tokens, K experts a token, E experts, H hidden size, I intermediate size; B batch, S queries, L keys, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Unary = Callable[[Tensor], Tensor]
Gate = Callable[[Tensor, Tensor], Tensor]


def _sigmoid(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.tanh(0.5 * x))  # 1 / (1 + exp(-x)), without overflow on either side


def silu(x: Tensor) -> Tensor:
    return x * _sigmoid(x)


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def relu2(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.zeros_like(x)).square()


def glu(activation: Unary) -> Gate:
    """`activation(gate) * up`."""
    return lambda gate, up: activation(gate) * up


def clamped_swiglu(limit: float) -> Gate:
    """`silu(min(gate, limit)) * clamp(up, -limit, limit)`, of DeepSeek-V4."""
    return lambda gate, up: silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def clamped_swiglu_after(limit: float) -> Gate:
    """`min(silu(gate), limit) * clamp(up, -limit, limit)`: the gate is clamped after its activation."""
    return lambda gate, up: silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def gpt_oss_gate(limit: float, alpha: float) -> Gate:
    """`g * sigmoid(alpha * g) * (clamp(up, -limit, limit) + 1)` with `g = min(gate, limit)`, of GPT-OSS."""

    def gated(gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.clamp(max=limit)
        return gate * _sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1)

    return gated


def softcapped_swiglu(gate_cap: float, up_cap: float) -> Gate:
    """`cap(gate) * sigmoid(gate) * cap(up)` with `cap(x) = c * tanh(x / c)`, of Inkling 2."""

    def gated(gate: Tensor, up: Tensor) -> Tensor:
        return gate_cap * torch.tanh(gate / gate_cap) * _sigmoid(gate) * up_cap * torch.tanh(up / up_cap)

    return gated


@dataclass(frozen=True, kw_only=True)
class ExpertsFormula:
    """How an experts layer reads its weights and what it computes between them.

    Attributes:
        gate: of (gate, up) for gated experts, of the projection alone for others.
        gated: whether the first projection is twice as wide, gate and up.
        transposed: weights are (E, in, out), otherwise (E, out, in).
        interleaved: gate and up alternate along the width, otherwise gate comes first.
        norm: the norm on each expert's output, of (output, weight), where there is one.
    """

    gate: Callable[..., Tensor]
    gated: bool = True
    transposed: bool = False
    interleaved: bool = False
    norm: Callable[[Tensor, Tensor], Tensor] | None = None


def experts(formula: ExpertsFormula, weights: Mapping[str, Tensor], x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """Every expert on every token; each token takes its share of each.

    Args:
        weights: `up`, `down` and, where the layer has them, `up_bias`, `down_bias` and `norm`, as stored.
        x: (T, H).
        ids: (T, K). An id that is none of 0..E-1 takes part in nothing.
        shares: (T, K), the router's weights.

    Returns:
        (T, H).
    """
    total = torch.zeros_like(x)
    for e in range(weights["up"].shape[0]):
        up, down = (weights[name][e] if formula.transposed else weights[name][e].T for name in ("up", "down"))
        hidden = x @ up
        if "up_bias" in weights:
            hidden = hidden + weights["up_bias"][e]
        if not formula.gated:
            hidden = formula.gate(hidden)
        elif formula.interleaved:
            hidden = formula.gate(hidden[:, 0::2], hidden[:, 1::2])
        else:
            half = hidden.shape[1] // 2
            hidden = formula.gate(hidden[:, :half], hidden[:, half:])
        output = hidden @ down
        if "down_bias" in weights:
            output = output + weights["down_bias"][e]
        if formula.norm is not None:
            output = formula.norm(output, weights["norm"])
        # an expert that a token names twice counts twice
        share = torch.where(ids == e, shares, torch.zeros_like(shares)).sum(-1, keepdim=True)
        total = total + share * output
    return total


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention, each group of query heads on its key-value head.

    Args:
        query: (B, Hq, S, D). key: (B, Hkv, L, D). value: (B, Hkv, L, Dv), Dv of any size.
        allowed: (B, S, L), true where a query sees a key. A query that sees none gets zeros.
        sinks: (Hq,): one more logit a head, which takes its part of the softmax and has no value.

    Returns:
        (B, S, Hq, Dv).
    """
    heads, groups = query.shape[1], query.shape[1] // key.shape[1]
    outputs = []
    for head in range(heads):
        keys, values = key[:, head // groups], value[:, head // groups]
        scores = scale * query[:, head] @ keys.transpose(1, 2)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~allowed, -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[head].expand(*scores.shape[:2], 1)], dim=-1)
        blind = torch.isneginf(scores).all(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)
        outputs.append(weights[..., : keys.shape[1]] @ values)
    return torch.stack(outputs, dim=2)


def visible(
    queries: int,
    keys: int,
    *,
    causal: bool = True,
    window: int | None = None,
    padding: Tensor | None = None,
    sequence: Tensor | None = None,
) -> Tensor:
    """Which keys each query sees, (B, S, L). The last query is at the last key.

    Args:
        window: a query sees itself and the `window - 1` keys before it.
        padding: (B, L), true for real tokens.
        sequence: (B, L), which of several packed sequences a token belongs to; they do not see one another.
    """
    batch = next((t.shape[0] for t in (padding, sequence) if t is not None), 1)
    q = torch.arange(keys - queries, keys)[:, None]
    k = torch.arange(keys)[None, :]
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        seen = seen & (k <= q)
    if window is not None:
        seen = seen & (k > q - window)
    result = seen.expand(batch, queries, keys)
    if padding is not None:
        result = result & padding.cpu().bool()[:, None, :]
    if sequence is not None:
        sequence = sequence.cpu()
        result = result & (sequence[:, keys - queries :, None] == sequence[:, None, :])
    return result


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(..., in) times weight (out, in), plus bias (out,)."""
    y = x @ weight.T
    return y if bias is None else y + bias


def rms_norm(x: Tensor, scale: Tensor | None, eps: float) -> Tensor:
    """`scale * x / sqrt(mean(x^2) + eps)` over the last dimension. Zero-centred weights are passed as `1 + weight`."""
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return y if scale is None else scale * y


def layer_norm(x: Tensor, scale: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`scale * (x - mean) / sqrt(variance + eps) + bias` over the last dimension."""
    centred = x - x.mean(-1, keepdim=True)
    return scale * centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() + bias


def scaled_input_rms_norm(eps: float) -> Callable[[Tensor, Tensor], Tensor]:
    """`z / sqrt(mean(z^2) + eps)` with `z = (1 + weight) * x`, of Muse Spark's experts."""
    return lambda x, weight: rms_norm((1 + weight) * x, None, eps)


def cross_entropy(logits: Tensor, targets: Tensor, *, ignore: int = -100, items: int | None = None) -> Tensor:
    """Mean over the targets that count, or their sum over `items` where it is given.

    Args:
        logits: (N, V). targets: (N,), `ignore` where nothing is to be predicted.
    """
    counted = targets != ignore
    rows, chosen = logits[counted], targets[counted]
    losses = torch.logsumexp(rows, dim=-1) - rows.gather(1, chosen[:, None])[:, 0]
    return losses.sum() / (int(counted.sum()) if items is None else items)


def raise_to_double(*tensors: Tensor | None, grad: bool = False) -> list[Any]:
    """Leaves in float64 on the CPU with these values, for `grad` to be taken of."""
    raised = [None if t is None else t.detach().cpu().double() for t in tensors]
    return [r if r is None else r.requires_grad_(grad) for r in raised]
