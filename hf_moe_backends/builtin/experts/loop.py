"""`experts="loop"`: one expert after another, as Transformers v4 did it. The code to read and to measure against."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_moe_backends.builtin.experts.layout import activate, finish, read_weights


def loop(experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Each token through its experts, weighted and summed.

    Args:
        experts: a decorated experts module with E local experts.
        hidden_states: (T, H).
        top_k_index: (T, K) integers. Ids outside 0..E-1 are pairs of other ranks and are skipped.
        top_k_weights: (T, K), of any floating dtype.

    Returns:
        (T, H) in the dtype of `hidden_states`, summed in float32 (float64 for float64).
    """
    weights = read_weights(experts)
    num_experts = weights.up.shape[0]
    accumulate = torch.promote_types(hidden_states.dtype, torch.float32)
    output = torch.zeros_like(hidden_states, dtype=accumulate)
    local = top_k_index[(top_k_index >= 0) & (top_k_index < num_experts)]
    # With nothing to do, one expert still runs on no rows: the output must stay connected to autograd.
    for expert in torch.unique(local).tolist() or [0]:
        token, slot = torch.where(top_k_index == expert)
        if local.numel() == 0:
            token = slot = token[:0]
        rows = hidden_states[token].to(weights.up.dtype) @ _matrix(weights.up, expert, weights.transposed)
        if weights.up_bias is not None:
            rows = rows + weights.up_bias[expert]
        rows = activate(experts, rows) @ _matrix(weights.down, expert, weights.transposed)
        if weights.down_bias is not None:
            rows = rows + weights.down_bias[expert]
        rows = finish(experts, rows).to(accumulate) * top_k_weights[token, slot, None].to(accumulate)
        output = output.index_add(0, token, rows)
    return output.to(hidden_states.dtype)


def _matrix(stored: Tensor, expert: int, transposed: bool) -> Tensor:
    """(in, out) of one expert."""
    return stored[expert] if transposed else stored[expert].t()
