"""The routed experts, each on its own rows side by side. Plain torch: replace it by your kernels, piece by piece."""

import torch
import torch.nn.functional as F


def experts_forward(experts, hidden_states, top_k_index, top_k_weights):
    """The contract of Transformers' `ALL_EXPERTS_FUNCTIONS`. T tokens, K experts a token, E experts, H hidden, I inner.

    Args:
        experts: the module, with gate_up_proj (E, 2I, H) and down_proj (E, H, I), which stay its own Parameters.
        hidden_states: (T, H).
        top_k_index: (T, K) int64, ids of experts.
        top_k_weights: (T, K), the router's weights; they need gradients.

    Returns:
        (T, H) in the dtype of `hidden_states`.
    """
    tokens, top_k = top_k_index.shape
    order = top_k_index.flatten().argsort(stable=True)  # permute: the pairs of one expert side by side
    sizes = torch.bincount(top_k_index.flatten(), minlength=experts.num_experts).tolist()
    outputs = []
    for expert, rows in enumerate(hidden_states[order // top_k].split(sizes)):
        activation = experts._apply_gate(F.linear(rows, experts.gate_up_proj[expert]))
        outputs.append(F.linear(activation, experts.down_proj[expert]))
    # Back in the order of pairs, so that each token sums its rows in a fixed order, and in float32 or better.
    rows = torch.cat(outputs)[order.argsort()].view(tokens, top_k, hidden_states.shape[1])
    accumulate = torch.promote_types(hidden_states.dtype, torch.float32)
    combined = (rows.to(accumulate) * top_k_weights.to(accumulate)[:, :, None]).sum(1)
    return combined.to(hidden_states.dtype)
