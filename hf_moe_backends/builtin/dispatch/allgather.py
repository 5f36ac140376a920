"""`allgather`: every rank of an expert group gets the tokens of all, runs its experts on them, and the outputs are
summed where the tokens came from.

On G ranks a token travels once to each, whatever the number of its experts: less than pairs do while G is below top-k.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hf_moe_backends.builtin.dispatch.collectives import (
    cpu_group,
    gather_tokens,
    longest,
    padded,
    scatter_sum,
    shared_slice,
    slice_of,
    sum_gradient,
    sum_over,
    unslice,
)


class AllGather:
    """A `hf_moe_backends.expert_parallel.Dispatcher`.

    Args:
        experts, ep_mesh, tp_mesh: as the contract has them.
        equal_lengths: every rank has as many tokens in every call, so that they need not tell each other. CUDA graphs
            need it. Where it is not so, the ranks hang or fail.
    """

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh, *, equal_lengths: bool = False):
        self.local_experts = int(experts.num_experts)  # type: ignore[arg-type]
        self.group, self.tp_group = ep_mesh.get_group(), tp_mesh.get_group()
        tp, ep = dist.get_process_group_ranks(self.tp_group), dist.get_process_group_ranks(self.group)
        self.shared = tp == ep
        """All ranks of the expert group have one batch: nothing needs to travel but the sum."""
        self.sliced = len(tp) > 1 and not self.shared
        """Ranks that have one batch among others: each sends its slice."""
        self.first = self.group.rank() * self.local_experts
        self.lengths = None if equal_lengths or self.shared else cpu_group(self.group)

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, tuple[int, int]]:
        """(T, H), (T, K), (T, K) -> (R, H), (R, K), (R, K) and the state (T, this rank's part of them).

        R is the same on all ranks of the expert group, and at least 1 unless they share a batch.
        """
        tokens = part = len(x)
        if self.shared:
            x, weights = sum_gradient(x, self.group), sum_gradient(weights, self.group)
        else:
            if self.sliced:
                x, weights = shared_slice(x, self.tp_group), shared_slice(weights, self.tp_group)
                ids = slice_of(ids, self.tp_group, -1)
                part = len(x)
            length = max(1, self._longest(part))
            x, ids, weights = padded(x, length), padded(ids, length, -1), padded(weights, length)
            x, ids, weights = gather_tokens(x, ids, weights, self.group)
        local = ids - self.first
        foreign = (local < 0) | (local >= self.local_experts)
        return x, local.masked_fill(foreign, self.local_experts), weights.masked_fill(foreign, 0), (tokens, part)

    def combine(self, y: Tensor, state: tuple[int, int]) -> Tensor:
        """(R, H) -> (T, H)."""
        if self.shared:
            return sum_over(y, self.group)
        tokens, part = state
        y = scatter_sum(y, self.group)[:part]
        return unslice(y, self.tp_group, tokens) if self.sliced else y

    def _longest(self, part: int) -> int:
        if self.lengths is None:
            return part
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "dispatcher='allgather' cannot be captured in a CUDA graph while ranks tell each other how many tokens "
                "they have. Where they always have as many, say so: "
                "options={'dispatcher.allgather': {'equal_lengths': True}}"
            )
        return longest(part, self.lengths)
