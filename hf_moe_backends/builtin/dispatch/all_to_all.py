"""`all_to_all` for Transformers below 5.19, which has none: every pair of a token and an expert travels to the expert.

What later versions have themselves, with the routing weights applied where the token came from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hf_moe_backends.builtin.dispatch.collectives import exchange, padded, shared_slice, slice_of, unslice


@dataclass(frozen=True, kw_only=True)
class _State:
    """What `combine` needs: (t, K) weights and the order in which their pairs were sent; rows to and from each rank."""

    weights: Tensor
    order: Tensor
    sent: list[int]
    received: list[int]
    tokens: int


class AllToAll:
    """A `hf_moe_backends.expert_parallel.Dispatcher`. Ranks that share a batch send a slice of it each.

    The host waits for the device once a call, for the sizes of the messages.
    """

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh):
        self.local_experts = int(experts.num_experts)  # type: ignore[arg-type]
        self.group, self.tp_group = ep_mesh.get_group(), tp_mesh.get_group()

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, _State]:
        """(T, H), (T, K), (T, K) -> (R, H), (R, 1), ones (R, 1) and the state. R is this rank's pairs."""
        tokens, top_k = ids.shape
        sharing = self.tp_group.size()
        if sharing > 1:
            length = -(-tokens // sharing)
            own = max(0, min(length, tokens - self.tp_group.rank() * length))  # the rest of a slice is padding
            x, weights = shared_slice(x, self.tp_group)[:own], shared_slice(weights, self.tp_group)[:own]
            ids = slice_of(ids, self.tp_group)[:own]
        pairs = ids.flatten()
        order = pairs.argsort(stable=True)
        ranks = self.group.size()
        counts = torch.bincount(pairs, minlength=ranks * self.local_experts).view(ranks, self.local_experts)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        sent, received = torch.stack([counts.sum(1), theirs.sum(1)]).tolist()
        rows = exchange(x[order // top_k], sent, received, self.group)
        local = torch.arange(self.local_experts, device=ids.device).repeat(ranks).repeat_interleave(theirs.flatten())
        state = _State(weights=weights, order=order, sent=sent, received=received, tokens=tokens)
        return rows, local.unsqueeze(1), weights.new_ones(len(rows), 1), state

    def combine(self, y: Tensor, state: _State) -> Tensor:
        """(R, H) -> (T, H)."""
        back = exchange(y, state.received, state.sent, self.group)
        pairs = torch.empty_like(back).index_copy(0, state.order, back)
        # a token's sum in the wider of the two dtypes
        summed = (pairs.view(*state.weights.shape, y.shape[1]) * state.weights.unsqueeze(2)).sum(1).to(y.dtype)
        sharing = self.tp_group.size()
        if sharing == 1:
            return summed
        return unslice(padded(summed, -(-state.tokens // sharing)), self.tp_group, state.tokens)
