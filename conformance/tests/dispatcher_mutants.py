"""Deliberately wrong dispatchers, each with the cells that must catch it, as `mutants.py` has them for other kinds.

Each is `right_dispatcher` but for one bug. That one gathers the tokens of all ranks, runs this rank's experts on them
and sums the outputs: slow, short, and right on every way of sharding.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import mutants
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mutants import Mutant, with_gradient
from torch import Tensor

from hf_moe_backends import BackendSpec, Capabilities, hookimpl

Exchange = Callable[[Tensor, Any], Tensor]
"""Of rows and a group."""

DISPATCHER_MUTANTS: list[Mutant] = []
BROKEN_RANK = ("rank_hangs", "rank_crashes", "rank_raises", "rank_refuses", "refuses", "constructor_fails")
"""What `test_dispatcher.py` looks at one by one."""


mutant = partial(mutants.mutant, "dispatcher", among=DISPATCHER_MUTANTS)


@hookimpl
def hf_moe_backends_register() -> list[BackendSpec]:
    capabilities = Capabilities(dtypes=frozenset({"float32", "bfloat16"}))
    names = ["right_dispatcher", "inference_only", "float32_only", *BROKEN_RANK, *(m.name for m in DISPATCHER_MUTANTS)]
    limits = {
        "inference_only": Capabilities(dtypes=capabilities.dtypes, training=False),
        "float32_only": Capabilities(dtypes=frozenset({"float32"})),
    }
    return [
        BackendSpec(
            kind="dispatcher",
            name=name,
            target=f"dispatcher_mutants:{name}",
            capabilities=limits.get(name, capabilities),
        )
        for name in names
    ]


def gathered(x: Tensor, group: Any) -> Tensor:
    """(size * T, ...): what each rank of a group has. All have as many."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def own_part(x: Tensor, group: Any) -> Tensor:
    return x.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()


def summed(x: Tensor, group: Any) -> Tensor:
    """(T, ...) of (size * T, ...): the sum over ranks of the part that is this rank's."""
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return own_part(total, group)


class _Exchange(torch.autograd.Function):
    """A linear function of the ranks' rows, and the one that is its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, forward: Exchange, backward: Exchange) -> Tensor:
        ctx.group, ctx.transposed = group, backward
        return forward(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.transposed(gradient, ctx.group), None, None, None


class right_dispatcher:  # noqa: N801 - backends are named so
    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any):
        self.experts_forward = experts.forward
        self.local = experts.num_experts
        self.ep_mesh, self.tp_mesh = ep_mesh, tp_mesh
        self.group, self.tp_group = ep_mesh.get_group(), tp_mesh.get_group()
        self.rank = ep_mesh.get_local_rank()

    def __call__(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        tokens = len(x)
        slices = self.slices()
        # as many on every rank of the expert group, and one at least
        length = self.longest(-(-tokens // slices))
        x, ids, shares = (self.padded(t, length * slices) for t in (x, ids, shares))
        if slices > 1:
            # what ranks share has a gradient that they share
            x, shares = (_Exchange.apply(t, self.tp_group, own_part, gathered) for t in (x, shares))
            ids = own_part(ids, self.tp_group)
        y = self.exchanged(x, ids, shares)
        if slices > 1:
            y = _Exchange.apply(y, self.tp_group, gathered, own_part)
        return y[:tokens]

    def slices(self) -> int:
        return self.tp_mesh.size()  # type: ignore[no-any-return]

    def longest(self, tokens: int) -> int:
        longest = torch.tensor(tokens, device=self.ep_mesh.device_type)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.group)
        return max(1, int(longest))

    def padded(self, rows: Tensor, length: int) -> Tensor:
        return F.pad(rows, (0, 0, 0, length - len(rows)), value=0 if rows.is_floating_point() else -1)

    def exchanged(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        """(T, H) -> (T, H), T the same on all ranks of the expert group."""
        x = _Exchange.apply(x, self.group, gathered, self.token_gradient)
        shares = _Exchange.apply(shares, self.group, gathered, summed)
        y = self.run_experts(x, *self.on_this_rank(gathered(ids, self.group), shares))
        return _Exchange.apply(y, self.group, summed, gathered)  # type: ignore[no-any-return]

    token_gradient = staticmethod(summed)

    def on_this_rank(self, ids: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        foreign = ids // self.local != self.rank
        return torch.where(foreign, self.local, ids % self.local), shares.masked_fill(foreign, 0)

    def run_experts(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        return self.experts_forward(x, ids, shares)  # type: ignore[no-any-return]


class inference_only(right_dispatcher):  # noqa: N801
    """Right, and claims no training."""


class float32_only(right_dispatcher):  # noqa: N801
    """Right, and claims float32 only."""


@mutant("model/logits[float32-ep2]", "forward[float32-ep2]", "forward[bfloat16-ep2]", "forward[bfloat16-tp2_fsdp2_ep4]")
class dispatched_scaled(right_dispatcher):  # noqa: N801
    """The output is 1% too large."""

    def __call__(self, *arguments: Tensor) -> Tensor:
        return super().__call__(*arguments) * 1.01


@mutant("forward[float32-ep2]", "forward[bfloat16-ep4]", "forward[float32-ep2_bias]")
class last_row_lost(right_dispatcher):  # noqa: N801
    """The last token of each rank is lost."""

    def exchanged(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        return super().exchanged(x, ids, torch.cat([shares[:-1], torch.zeros_like(shares[-1:])]))


@mutant("model/gradients[float32-ep2]", "grad/d_router[float32-ep2]", "grad/d_router[bfloat16-tp2_ep2]")
class dispatch_detaches_router(right_dispatcher):  # noqa: N801
    """Router weights travel without their gradient."""

    def __call__(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        return super().__call__(x, ids, shares.detach())


@mutant("grad/dX[float32-ep2]", "grad/dX[bfloat16-ep2]", "model/gradients[float32-fsdp4_ep2]")
class own_gradient_only(right_dispatcher):  # noqa: N801
    """A token's gradient from the experts of other ranks is lost."""

    token_gradient = staticmethod(own_part)


@mutant("grad/dX[bfloat16-ep2]", "grad/d_router[bfloat16-ep2]", "grad/weights[bfloat16-ep2]")
class combine_gradient(right_dispatcher):  # noqa: N801
    """The gradients of everything before the combine are 2% too large."""

    def run_experts(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        return with_gradient(super().run_experts(x, ids, shares))


@mutant("forward[float32-ep2]", "forward[float32-tp2_ep2_bias]", "edge/one_rank[float32-ep2]")
class foreign_counted(right_dispatcher):  # noqa: N801
    """Pairs of other ranks keep their weight and run on a local expert."""

    def on_this_rank(self, ids: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        return ids % self.local, shares


@mutant("grad/d_router[float32-ep2]", "grad/d_router[bfloat16-ep2_bias]")
class foreign_in_router_gradient(right_dispatcher):  # noqa: N801
    """Pairs of other ranks run on a local expert. Their weight of zero hides it from all but the router's gradient."""

    def on_this_rank(self, ids: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        ids, _ = super().on_this_rank(ids, shares)
        foreign = ids == self.local
        zero = shares - shares.detach()  # whose gradient is that of the weight
        return ids.masked_fill(foreign, 0), torch.where(foreign, zero, shares)


@mutant("forward[float32-ep2]", "forward[float32-fsdp4_ep2]")
class experts_dealt(right_dispatcher):  # noqa: N801
    """Experts are taken to be dealt to the ranks in turn, and are sharded in blocks."""

    def on_this_rank(self, ids: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        size = self.ep_mesh.size()
        foreign = ids % size != self.rank
        return torch.where(foreign, self.local, ids // size), shares.masked_fill(foreign, 0)


@mutant("forward[float32-fsdp4_ep2]", "forward[bfloat16-tp2_fsdp2_ep2]", "model/logits[float32-fsdp4_ep2]")
class world_for_group(right_dispatcher):  # noqa: N801
    """All ranks are taken for the expert group."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.group = dist.group.WORLD


@mutant("grad/weights[float32-tp2_ep2]", "grad/weights[bfloat16-tp2_fsdp2_ep4]", "model/gradients[float32-tp2_ep2]")
class shared_batch_sent_twice(right_dispatcher):  # noqa: N801
    """Ranks that share a batch each send all of it, so that experts see it twice."""

    def slices(self) -> int:
        return 1


@mutant("forward[float32-tp2_ep2]", "forward[float32-tp2_fsdp2_ep4]", "model/logits[float32-tp2_ep2]")
class slices_kept_apart(right_dispatcher):  # noqa: N801
    """Ranks that share a batch each have the output of their own slice only."""

    def __call__(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        y = super().__call__(x, ids, shares)
        slices = self.slices()
        kept = torch.arange(len(y), device=y.device) * slices // max(1, len(y)) == self.tp_mesh.get_local_rank()
        return y if slices == 1 else y * kept[:, None]


@mutant("edge/uneven_tokens[float32-ep2]", "edge/uneven_tokens[float32-tp2_fsdp2_ep4]", "edge/empty_rank[float32-ep2]")
class equal_lengths(right_dispatcher):  # noqa: N801
    """Every rank is taken to have as many tokens as this one."""

    def longest(self, tokens: int) -> int:
        return max(1, tokens)


@mutant("edge/no_tokens[float32-ep2]", "edge/no_tokens[float32-tp2_ep2]", "edge/empty_rank[float32-ep2]")
class new_zeros_when_empty(right_dispatcher):  # noqa: N801
    """A rank without tokens returns new zeros, which autograd does not know, and the others wait in their backward."""

    def __call__(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        y = super().__call__(x, ids, shares)
        return y if len(x) else torch.zeros_like(x)


@mutant("edge/empty_rank[float32-ep2]", "edge/empty_rank[bfloat16-fsdp4_ep2]", "edge/no_tokens[float32-ep2]")
class asks_no_ids(right_dispatcher):  # noqa: N801
    """The largest of this rank's ids is asked for, which no tokens do not have."""

    def __call__(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        assert int(ids.max()) < self.local * self.ep_mesh.size()
        return super().__call__(x, ids, shares)


@mutant("edge/one_rank[float32-ep2]", "edge/one_rank[float32-tp2_ep2]")
class new_zeros_when_idle(right_dispatcher):  # noqa: N801
    """A rank whose experts nobody chose returns new zeros, which autograd does not know."""

    def run_experts(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        if bool((ids == self.local).all()):
            return torch.zeros_like(x)
        return super().run_experts(x, ids, shares)


@mutant("edge/one_rank[float32-ep2]", "edge/one_rank[bfloat16-ep2]", "edge/one_rank[float32-fsdp4_ep2]")
class over_capacity_dropped(right_dispatcher):  # noqa: N801
    """A rank takes one and a half times its share of the pairs, and what is more is dropped."""

    def on_this_rank(self, ids: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        ids, shares = super().on_this_rank(ids, shares)
        here = (ids != self.local).flatten()
        dropped = ((here.cumsum(0) > 1.5 * len(here) / self.ep_mesh.size()) & here).view_as(ids)
        return ids.masked_fill(dropped, self.local), shares.masked_fill(dropped, 0)


@mutant("edge/router_dtype[bfloat16-ep2]", "edge/router_dtype[bfloat16-tp2_ep2]")
class one_buffer(right_dispatcher):  # noqa: N801
    """Router weights travel in a buffer of the tokens' dtype, and are read from memory as if they were in it."""

    def exchanged(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        return super().exchanged(x, ids, shares.view(x.dtype)[:, : shares.shape[1]])


@mutant("edge/strided[float32-ep2]", "edge/strided[bfloat16-fsdp4_ep2]")
class dispatch_ignores_strides(right_dispatcher):  # noqa: N801
    """Tokens are read as if they were contiguous."""

    def __call__(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        return super().__call__(x.as_strided(x.shape, (x.shape[1], 1)), ids, shares)


class _Busy(torch.autograd.Function):
    """Holds a dispatcher's buffer from the dispatch to its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dispatcher: Any) -> Tensor:
        ctx.dispatcher = dispatcher
        dispatcher.busy = True
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.dispatcher.busy = False
        return gradient, None


@mutant("mode/checkpoint[float32-ep2]", "mode/checkpoint[float32-fsdp4_ep2]")
class one_forward_in_flight(right_dispatcher):  # noqa: N801
    """Its one buffer is held until the backward, and a forward before that fails."""

    busy = False

    def __call__(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        if self.busy:
            raise RuntimeError("the buffer is in use")
        return super().__call__(_Busy.apply(x, self) if x.requires_grad else x, ids, shares)


class _Padded(torch.autograd.Function):
    tokens = 0

    @staticmethod
    def forward(ctx: Any, rows: Tensor, length: int) -> Tensor:
        _Padded.tokens = len(rows)
        return F.pad(rows, (0, 0, 0, length - len(rows)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient[: _Padded.tokens], None


@mutant("mode/two_models[float32-ep2]", "mode/two_models[float32-tp2_ep2]")
class state_shared(right_dispatcher):  # noqa: N801
    """How many tokens there were is kept in one place for all models."""

    def padded(self, rows: Tensor, length: int) -> Tensor:
        return _Padded.apply(rows, length) if rows.requires_grad else super().padded(rows, length)  # type: ignore[no-any-return]


@mutant("exception/forward[float32-ep2]", "exception/forward[float32-tp2_ep2]", "exception/forward[float32-ep4]")
class swallows(right_dispatcher):  # noqa: N801
    """An exception of the experts is logged, and their output is zero."""

    def run_experts(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        try:
            return super().run_experts(x, ids, shares)
        except Exception as error:
            print(error)
            return x * 0


class _Shielded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        ctx.leaves = [t.detach().requires_grad_() for t in (x, shares)]
        with torch.enable_grad():
            ctx.y = run(ctx.leaves[0], ids, ctx.leaves[1])
        return ctx.y.detach()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        try:
            ctx.y.backward(gradient)
        except Exception as error:
            print(error)
        x, shares = (leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in ctx.leaves)
        return None, x, None, shares


@mutant("exception/backward[float32-ep2]", "exception/backward[float32-tp2_ep2]")
class swallows_in_backward(right_dispatcher):  # noqa: N801
    """An exception of the experts' backward is logged, and the gradient is zero."""

    def run_experts(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        return _Shielded.apply(super().run_experts, x, ids, shares)  # type: ignore[no-any-return]


@mutant("exception/forward[float32-ep2]")
class waits_for_peers(right_dispatcher):  # noqa: N801
    """After an exception it first waits for all ranks to say that they are well, which they never do."""

    def run_experts(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        try:
            return super().run_experts(x, ids, shares)
        except Exception:
            dist.barrier(self.group)
            time.sleep(1000)
            raise


# One rank ends or blocks.


def on_last_rank() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


class rank_hangs(right_dispatcher):  # noqa: N801
    """The last rank never returns."""

    def run_experts(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        if on_last_rank():
            time.sleep(1000)
        return super().run_experts(x, ids, shares)


class rank_crashes(right_dispatcher):  # noqa: N801
    """The last rank reads from address 0."""

    def run_experts(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        if on_last_rank():
            ctypes.string_at(0)
        return super().run_experts(x, ids, shares)


class rank_raises(right_dispatcher):  # noqa: N801
    """The last rank raises."""

    def run_experts(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        if on_last_rank():
            raise ZeroDivisionError("of its own")
        return super().run_experts(x, ids, shares)


class rank_refuses(right_dispatcher):  # noqa: N801
    """The last rank refuses and the others do not."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        if on_last_rank():
            raise ValueError("this rank has no NVLink")


class refuses(right_dispatcher):  # noqa: N801
    """Every rank refuses."""

    def __init__(self, *arguments: Any):
        raise ValueError("no rank has NVLink")


class constructor_fails(right_dispatcher):  # noqa: N801
    """The constructor has a bug."""

    def __init__(self, *arguments: Any):
        raise AttributeError("a bug")
