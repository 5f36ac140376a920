"""`experts="torch_mm"`: all experts in one grouped matrix product a projection."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_moe_backends.builtin.experts.layout import activate, finish, read_weights


def torch_mm(experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Each token through its experts, weighted and summed.

    Args:
        experts: a decorated experts module with E local experts.
        hidden_states: (T, H).
        top_k_index: (T, K) integers. Ids outside 0..E-1 are pairs of other ranks and contribute nothing, to the output
            or to any gradient.
        top_k_weights: (T, K), of any floating dtype.

    Returns:
        (T, H) in the dtype of `hidden_states`, summed in a fixed order in float32 (float64 for float64).
    """
    weights = read_weights(experts)
    num_experts = weights.up.shape[0]
    num_tokens, top_k = top_k_index.shape
    accumulate = torch.promote_types(hidden_states.dtype, torch.float32)

    # Sort the (token, slot) pairs by expert; pairs of other ranks go to the end, as expert E.
    ids = top_k_index.reshape(-1)
    ids = torch.where((ids < 0) | (ids >= num_experts), num_experts, ids)
    sorted_ids, order = torch.sort(ids, stable=True)
    offsets = torch.searchsorted(
        sorted_ids, torch.arange(num_experts, device=ids.device, dtype=ids.dtype), right=True
    ).to(torch.int32)
    # The grouped products leave the rows after the last offset unwritten, forward and backward: each mask below drops
    # them where something would read them, a NaN times zero being a NaN.
    elsewhere = (sorted_ids == num_experts)[:, None]
    row_ids = sorted_ids.clamp(max=num_experts - 1)

    rows = hidden_states[order // top_k].to(weights.up.dtype).masked_fill(elsewhere, 0)
    rows = _grouped_mm(rows, weights.up, offsets).masked_fill(elsewhere, 0)
    if weights.up_bias is not None:
        rows = rows + weights.up_bias[row_ids]
    rows = _grouped_mm(activate(experts, rows).to(weights.down.dtype), weights.down, offsets)
    rows = rows.masked_fill(elsewhere, 0)
    if weights.down_bias is not None:
        rows = rows + weights.down_bias[row_ids]
    rows = finish(experts, rows)

    pair_weights = top_k_weights.reshape(-1)[order].masked_fill(elsewhere[:, 0], 0)
    rows = rows.to(accumulate).masked_fill(elsewhere, 0) * pair_weights.to(accumulate)[:, None]
    # Back to (token, slot) order, so that a token's rows are summed in the order of its slots whatever the sort did.
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    return rows[inverse].view(num_tokens, top_k, -1).sum(1).to(hidden_states.dtype)


def _grouped_mm(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Rows (R, A) of expert e, the ones before offsets[e], times weight[e] of (E, A, B) -> (R, B).

    Rows after the last offset are not computed.
    """
    if _torch_has_kernel(rows, weight):
        return F.grouped_mm(rows, weight, offs=offsets)
    ends = offsets.tolist()
    pieces = [rows[start:end] @ weight[i] for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]
    return torch.cat([*pieces, rows.new_zeros(rows.shape[0] - ends[-1], weight.shape[2])])


def _torch_has_kernel(rows: Tensor, weight: Tensor) -> bool:
    """Whether `F.grouped_mm` takes these operands.

    It knows no float64, wants strides of whole 16 bytes and data on 16-byte boundaries (which a memory-mapped
    checkpoint need not have), and its backward fails on no rows at all.
    """
    if rows.dtype not in (torch.float32, torch.bfloat16, torch.float16) or rows.shape[0] == 0:
        return False
    per_16_bytes = 16 // rows.element_size()
    if any(size % per_16_bytes for size in (*weight.shape[1:],)):
        return False
    return torch.compiler.is_compiling() or (rows.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0)
