"""Deliberately wrong backends, each with the cells that must catch it. They test the suite.

Each is right but for one bug, so that a cell that fails fails for that bug; `right` of each kind is the same without
one. The module is a plugin like any other: `conftest.py` installs it as a distribution.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_moe_backends import AttentionBackend, BackendSpec, Capabilities, FusedLoss, hookimpl
from hf_moe_backends.builtin.experts.loop import loop
from hf_moe_backends.spec import FEATURES


@dataclass(frozen=True)
class Mutant:
    kind: str
    name: str
    kills: tuple[str, ...]
    """The cells that must fail."""
    bug: str
    on_gpu: tuple[str, ...] = ()
    """Those that mean something on a GPU only."""

    @property
    def full_name(self) -> str:
        return f"{self.kind}={self.name}"


MUTANTS: list[Mutant] = []
BROKEN_PROCESS = {
    "imports_nothing": "its module is not there",
    "hangs": "it never returns",
    "crashes": "it reads from address 0",
    "exits": "it ends the process",
}
"""Experts backends that end or block the process. `test_worker.py` runs them in one of their own."""


def mutant(kind: str, *kills: str, on_gpu: tuple[str, ...] = (), among: list[Mutant] = MUTANTS) -> Callable[[Any], Any]:
    def declare(target: Any) -> Any:
        bug = (target.__doc__ or "").strip().rstrip(".")
        assert bug and kills, target
        among.append(Mutant(kind, target.__name__, kills, bug, on_gpu))
        return target

    return declare


@hookimpl
def hf_moe_backends_register() -> list[BackendSpec]:
    offered = [(m.kind, m.name) for m in MUTANTS] + [("experts", name) for name in BROKEN_PROCESS]
    offered += [("loss", "fused_right")]
    offered += [(kind, f"right_{kind}") for kind in ("experts", "attn", "linear", "norm", "loss")]
    specs = []
    for kind, name in offered:
        target = "absent:absent" if name == "imports_nothing" else f"mutants:{name}"
        capabilities = Capabilities(
            dtypes=frozenset({"float32", "bfloat16"}),
            features=frozenset(FEATURES[kind]) - {"custom"},  # type: ignore[index]
            fuses_head=name.startswith("fused_"),
        )
        specs.append(BackendSpec(kind=kind, name=name, target=target, capabilities=capabilities))  # type: ignore[arg-type]
    return specs


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


def with_gradient(x: Tensor, factor: float = 1.02) -> Tensor:
    """The same value, and a gradient that is off by this factor."""
    return _ScaledGradient.apply(x, factor)  # type: ignore[no-any-return]


# Experts.


def right_experts(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """One expert after another, on a dense mask, without asking the device which were hit."""
    return combine(dense(view(experts), x, ids), x, ids, shares, experts.num_experts)


class View:
    """Attributes. Not a SimpleNamespace, which Dynamo does not trace."""

    def __init__(self, attributes: dict[str, Any]):
        for name, value in attributes.items():
            setattr(self, name, value)


def view(experts: Any, **changed: Any) -> Any:
    """An experts module's attributes, some of them changed."""
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    found = {
        "up": getattr(experts, name),
        "down": experts.down_proj,
        "up_bias": getattr(experts, f"{name}_bias", None),
        "down_bias": getattr(experts, "down_proj_bias", None),
        "transposed": experts.is_transposed,
        "gate": experts._apply_gate if experts.has_gate else experts.act_fn,
        "norm": getattr(experts, "post_expert_norm", lambda rows: rows),
    }
    return View(found | changed)


def dense(w: Any, x: Tensor, ids: Tensor) -> Tensor:
    """Every expert's output on every token, (E, T, H)."""
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else w.up.dtype
    rows = x.to(autocast)

    def product(a: Tensor, stored: Tensor) -> Tensor:
        return a @ (stored if w.transposed else stored.transpose(1, 2)).to(a.dtype)

    pre = product(rows.expand(len(w.up), *rows.shape), w.up)
    if w.up_bias is not None:
        pre = pre + w.up_bias[:, None].to(pre.dtype)
    out = product(w.gate(pre), w.down)
    if w.down_bias is not None:
        out = out + w.down_bias[:, None].to(out.dtype)
    return w.norm(out)  # type: ignore[no-any-return]


def combine(outputs: Tensor, x: Tensor, ids: Tensor, shares: Tensor, experts: int) -> Tensor:
    numbers = torch.arange(experts, device=x.device)[:, None, None]
    wide = torch.promote_types(x.dtype, torch.float32)
    weights = torch.where(ids[None] == numbers, shares[None].to(wide), 0).sum(-1, keepdim=True)
    return (weights * outputs.to(wide)).sum(0).to(x.dtype)


@mutant("experts", "forward[float32-default]", "forward[bfloat16-default]", "model/logits[float32-mixtral]")
def output_scaled(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """The output is 1% too large."""
    return right_experts(experts, x, ids, shares) * 1.01


@mutant("experts", "edge/router_dtype[bfloat16-default]", "edge/router_dtype[float32-default]")
def one_dtype_only(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """Memory of router weights in another dtype than the tokens' is read as if it were in theirs."""
    if shares.dtype != x.dtype:
        shares = shares.contiguous().view(-1).view(x.dtype)[: len(x), None].expand(ids.shape)
    return right_experts(experts, x, ids, shares)


@mutant("experts", "forward[float32-default]", "grad/dW_up[float32-default]")
def router_rounded(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """Router weights are rounded to bfloat16."""
    return right_experts(experts, x, ids, shares.bfloat16().to(shares.dtype))


@mutant("experts", "forward[float32-default]", "forward[bfloat16-default]", "model/logits[float32-qwen3_moe]")
def gelu_for_silu(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """GELU in the place of SiLU."""

    def gate(pre: Tensor) -> Tensor:
        gate, up = pre.chunk(2, dim=-1)
        return F.gelu(gate) * up

    return combine(dense(view(experts, gate=gate), x, ids), x, ids, shares, experts.num_experts)


@mutant("experts", "forward[float32-gelu]")
def exact_gelu(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """The exact GELU in the place of its tanh approximation."""
    return gelu_for_silu(experts, x, ids, shares)


@mutant("experts", "forward[float32-default]", "forward[bfloat16-default]")
def last_token_dropped(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """The last token of a large batch is lost."""
    y = right_experts(experts, x, ids, shares)
    return torch.cat([y[:-1], torch.zeros_like(y[-1:])]) if len(y) > 1024 else y


@mutant("experts", "grad/d_router[float32-default]", "model/gradients[float32-mixtral]")
def router_detached(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """The router gets no gradient."""
    return right_experts(experts, x, ids, shares.detach())


@mutant(
    "experts", "forward[bfloat16-interleaved]", "forward[float32-bias]", "grad/db_up[float32-bias]",
    "grad/db_down[float32-bias]",
)  # fmt: skip
def bias_forgotten(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """Biases are left out."""
    outputs = dense(view(experts, up_bias=None, down_bias=None), x, ids)
    return combine(outputs, x, ids, shares, experts.num_experts)


@mutant(
    "experts", "sentinels/forward[float32-default]", "sentinels/grad[bfloat16-default]",
    "sentinels/d_router[float32-default]", "sentinels/all[float32-default]",
)  # fmt: skip
def sentinels_counted(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """Pairs of other ranks go to the last expert, and weights are normalised again."""
    total = shares.sum(-1, keepdim=True)
    shares = torch.where(total > 0, shares / total, 0.5)
    return right_experts(experts, x, ids.clamp(max=experts.num_experts - 1), shares)


@mutant("experts", "sentinels/d_router[float32-default]")
def sentinels_in_router_gradient(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """Pairs of other ranks go to the last expert; their zero weight hides it from all but the router's gradient."""
    return right_experts(experts, x, ids.clamp(max=experts.num_experts - 1), shares)


@mutant("experts", "sentinels/negative[float32-default]")
def negative_counted(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """Tokens an expert are counted by a function that fails on -1."""
    torch.bincount(ids.flatten())
    return right_experts(experts, x, ids, shares)


class _Uninitialised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        empty = ~gradient.flatten(1).any(1)
        return torch.where(empty.view(-1, *[1] * (gradient.ndim - 1)), 1e-3, gradient)


@mutant("experts", "grad/unrouted[float32-default]", "grad/dW_up[float32-default]")
def empty_gradient_uninitialised(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """The gradient of an expert without tokens is whatever was in memory."""
    up = _Uninitialised.apply(view(experts).up)
    return combine(dense(view(experts, up=up), x, ids), x, ids, shares, experts.num_experts)


@mutant("experts", "forward[float32-transposed]", "forward[bfloat16-interleaved]")
def transposed_misread(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """The transposed layout is read as the default one, where the shapes happen to allow it."""
    w = view(experts)
    if w.transposed and w.up.shape[1] == w.up.shape[2]:
        w.up = w.up.transpose(1, 2)
    return combine(dense(w, x, ids), x, ids, shares, experts.num_experts)


@mutant("experts", "forward[float32-interleaved]", "forward[bfloat16-interleaved]")
def interleaved_misread(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """Interleaved gate and up columns are read as concatenated."""
    w = view(experts)
    if not experts.is_concatenated:
        own, half = w.gate, w.up.shape[-1] // 2
        w.gate = lambda pre: own(torch.stack([pre[..., :half], pre[..., half:]], dim=-1).flatten(-2))
    return combine(dense(w, x, ids), x, ids, shares, experts.num_experts)


@mutant("experts", "forward[float32-clamped]", "forward[bfloat16-clamped]", "forward[float32-custom_gate]")
def clamp_forgotten(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """Every gate is taken for a plain SwiGLU."""

    def gate(pre: Tensor) -> Tensor:
        gate, up = pre.chunk(2, dim=-1)
        return F.silu(gate) * up

    return combine(dense(view(experts, gate=gate), x, ids), x, ids, shares, experts.num_experts)


@mutant("experts", "forward[float32-default]", "forward[bfloat16-default]")
def duplicates_once(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """An expert that a token names twice counts once."""
    earlier = (ids[:, :, None] == ids[:, None, :]).tril(-1).any(-1)
    return right_experts(experts, x, ids, shares.masked_fill(earlier, 0))


def _rounded(experts: Any, x: Tensor, ids: Tensor, shares: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
    w = view(experts)
    w.up, w.down = rounding(w.up), rounding(w.down)
    return combine(dense(w, rounding(x), ids), x, ids, shares, experts.num_experts)


@mutant("experts", "forward[float32-default]", "grad/dX[float32-default]", "model/logits[float32-mixtral]")
def downcast(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """Products are in bfloat16 whatever the dtype."""
    return _rounded(experts, x, ids, shares, lambda t: t.bfloat16().to(t.dtype))


@mutant("experts", "forward[float32-default]", "grad/dW_down[float32-default]")
def tf32(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """float32 products keep 10 bits of the mantissa, as TF32 does."""

    def rounding(t: Tensor) -> Tensor:
        if t.dtype != torch.float32:
            return t
        scale = torch.exp2(torch.floor(torch.log2(t.detach().abs().clamp_min(1e-30))) - 10)
        return t + (torch.round(t.detach() / scale) * scale - t.detach())

    return _rounded(experts, x, ids, shares, rounding)


@mutant("experts", "mode/repeat[float32-default]", "mode/repeat_backward[float32-default]")
def random_order(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """Sums run in another order each time."""
    slots = torch.randperm(ids.shape[1]).tolist()
    parts = [loop(experts, x, ids[:, [slot]], shares[:, [slot]]) for slot in slots]
    return sum(parts[1:], parts[0])


@mutant("experts", "forward[float32-default]", "forward[bfloat16-default]", "grad/dX[bfloat16-default]")
def wrong_when_large(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """Small batches go to stock eager; the kernel's own code, for large ones, is 5% off."""
    y = right_experts(experts, x, ids, shares)
    return y if ids.numel() < 1024 else 1.05 * y


@mutant("experts", "forward[float32-default]", "edge/nan_row[float32-default]", "model/logits[float32-mixtral]")
def one_nan(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """One number is NaN."""
    y = right_experts(experts, x, ids, shares).clone()
    if len(y):
        y[0, 0] = torch.nan
    return y


@mutant("experts", "forward[float32-default]", "grad/dX[float32-default]", "model/gradients[float32-mixtral]")
def all_zeros(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """The output is zero."""
    return right_experts(experts, x, ids, shares) * 0


@mutant("experts", "grad/dX[float32-default]", "grad/dX[bfloat16-default]", "grad/frozen[float32-default]")
def dx_scaled(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """dX is 2% too large."""
    return right_experts(experts, with_gradient(x), ids, shares)


def _scaled(which: str) -> Callable[..., Tensor]:
    def run(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        w = view(experts)
        if which != "norm":
            setattr(w, which, with_gradient(getattr(w, which)))
        elif experts.has_post_expert_norm:
            own = experts.post_expert_norm
            scaled = with_gradient(own.weight)
            w.norm = lambda rows: torch.func.functional_call(own, {"weight": scaled}, (rows,))
        return combine(dense(w, x, ids), x, ids, shares, experts.num_experts)

    return run


def _declare_scaled(name: str, which: str, tensor: str, *kills: str) -> None:
    run = _scaled(which)
    run.__name__, run.__doc__ = name, f"{tensor} is 2% too large."
    globals()[name] = mutant("experts", *kills)(run)


_declare_scaled("dw_up_scaled", "up", "dW_up", "grad/dW_up[bfloat16-default]", "grad/input_frozen[float32-default]")
_declare_scaled("dw_down_scaled", "down", "dW_down", "grad/dW_down[bfloat16-default]", "grad/dW_down[float32-ungated]")
_declare_scaled("db_up_scaled", "up_bias", "db_up", "grad/db_up[float32-bias]", "grad/db_up[float32-interleaved]")
_declare_scaled("db_down_scaled", "down_bias", "db_down", "grad/db_down[bfloat16-interleaved]")
_declare_scaled(
    "dw_norm_scaled", "norm", "dW_norm", "grad/dW_norm[float32-post_norm]", "grad/dW_norm[bfloat16-post_norm]"
)


@mutant("experts", "grad/frozen[float32-default]")
def frozen_get_gradients(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """Frozen weights get gradients all the same."""
    experts.down_proj.grad = torch.zeros_like(experts.down_proj)
    return right_experts(experts, x, ids, shares)


@mutant("experts", "grad/input_frozen[float32-default]")
def needs_input_gradient(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """Weights get a gradient only where the input needs one."""
    y = right_experts(experts, x, ids, shares)
    return y if x.requires_grad else y.detach() + 0 * view(experts).up.sum()


@mutant("experts", "edge/no_tokens[float32-default]", "edge/no_tokens_backward[float32-default]")
def fails_on_nothing(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """The largest id of no ids is asked for."""
    ids.max()
    return right_experts(experts, x, ids, shares)


@mutant("experts", "edge/no_tokens_backward[float32-default]", "sentinels/all[float32-default]")
def early_return(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """Without pairs of its own it returns new zeros, which autograd does not know."""
    if not (ids < experts.num_experts).any():
        return torch.zeros_like(x)
    return right_experts(experts, x, ids, shares)


@mutant("experts", "edge/int32_ids[float32-default]")
def int64_only(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """Ids are counted by a function that takes 64 bits only."""
    F.one_hot(ids.clamp(0, experts.num_experts))
    return right_experts(experts, x, ids, shares)


@mutant("experts", "edge/strided[float32-default]")
def strides_ignored(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """Inputs are read as if they were contiguous."""
    return right_experts(experts, x.as_strided(x.shape, (x.shape[1], 1)), ids, shares)


class _ContiguousCotangent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.as_strided(gradient.shape, (gradient.shape[1], 1))


@mutant("experts", "edge/strided_backward[float32-default]")
def cotangent_strides_ignored(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """The cotangent is read as if it were contiguous."""
    return _ContiguousCotangent.apply(right_experts(experts, x, ids, shares))  # type: ignore[no-any-return]


@mutant("experts", "edge/odd_sizes[float32-default]", "edge/odd_sizes_backward[bfloat16-default]")
def tail_dropped(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """What is beyond a multiple of 8 in the intermediate size is left out."""
    down = experts.down_proj
    if not experts.is_transposed:
        inside = torch.arange(down.shape[2], device=x.device) < down.shape[2] // 8 * 8
        down = down * inside.to(down.dtype)
    return combine(dense(view(experts, down=down), x, ids), x, ids, shares, experts.num_experts)


@mutant("experts", "edge/nan_row[float32-default]")
def nan_spreads(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """Rows are masked by multiplying with zero, so that a NaN gets into all."""
    return right_experts(experts, x, ids, shares) + 0 * x.sum()


@mutant("experts", "edge/large_values[float32-default]", "edge/large_values[bfloat16-default]")
def sigmoid_overflows(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """The sigmoid is exp(x) / (1 + exp(x))."""

    def gate(pre: Tensor) -> Tensor:
        gate, up = pre.chunk(2, dim=-1)
        return gate * (gate.exp() / (1 + gate.exp())) * up

    return combine(dense(view(experts, gate=gate), x, ids), x, ids, shares, experts.num_experts)


@mutant("experts", "edge/inputs_kept[float32-default]")
def input_as_buffer(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """The output is written over the input."""
    y = right_experts(experts, x, ids, shares)
    return x.copy_(y)


@mutant("experts", "mode/inference[float32-default]")
def versions_checked(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """A cache is keyed by the input's version, which inference tensors do not have."""
    y = right_experts(experts, x, ids, shares)
    _ = y._version
    return y


@mutant("experts", "mode/grad_off[float32-default]")
def graph_always(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """A graph is kept under no_grad."""
    with torch.enable_grad():
        return right_experts(experts, x, ids, shares)


@mutant("experts", "mode/autocast[float32-default]")
def autocast_output(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """Under autocast the output has autocast's dtype and not the input's."""
    y = right_experts(experts, x, ids, shares)
    return y.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else y


@mutant("experts", "mode/checkpoint[float32-default]")
def every_second_call(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """A buffer is reused in every second call, before the first has had its backward."""
    _calls[0] += 1
    return right_experts(experts, x * (1.5 if _calls[0] % 2 == 0 else 1.0), ids, shares)


_calls = [0]


@mutant("experts", "mode/accumulate[float32-default]")
def gradients_overwritten(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """A new gradient takes the place of the one before."""
    for parameter in experts.parameters():
        parameter.grad = None
    return right_experts(experts, x, ids, shares)


@mutant(
    "experts",
    "mode/compile[float32-default]",
    on_gpu=("mode/cuda_graph[float32-default]", "mode/cuda_graph_backward[float32-default]"),
)
def graph_break(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """The host asks the device how many pairs there are."""
    if int((ids >= 0).sum()) < 0:
        return x
    return right_experts(experts, x, ids, shares)


@mutant("experts", "mode/lora[float32-default]")
def lora_ignored(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """Weights are read where they are stored, past the parametrization."""
    held = getattr(experts, "parametrizations", {})
    w = view(experts)
    if "down_proj" in held:
        w.down = held["down_proj"].original
    return combine(dense(w, x, ids), x, ids, shares, experts.num_experts)


@mutant("experts", "mode/switch[float32-default]")
def repacks_weights(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """Weights are repacked in place for the kernel, and stay so."""
    y = right_experts(experts, x, ids, shares)
    with torch.no_grad():
        experts.down_proj.copy_(experts.down_proj.roll(1, dims=0))
    return y


_kept: dict[int, Any] = {}


@mutant("experts", "mode/weights_written[float32-default]")
def stale_weights(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """A repacked copy of the weights is made once and kept."""
    # the module is kept too, so that no other one gets its id
    _, down = _kept.setdefault(id(experts), (experts, experts.down_proj.detach().clone()))
    return combine(dense(view(experts, down=down), x, ids), x, ids, shares, experts.num_experts)


def hangs(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    time.sleep(3600)
    return x


def crashes(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    ctypes.string_at(0)
    return x


def exits(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    os._exit(3)


# Attention.


def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **how: Any) -> Any:
    """Plain attention with every feature, on Transformers' additive mask."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = (query @ key.transpose(2, 3)).float() * how["scaling"]
    if how.get("softcap") is not None:
        scores = how["softcap"] * torch.tanh(scores / how["softcap"])
    if mask is not None:
        scores = scores + mask
    sinks = how.get("s_aux")
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = how.get("softmax", torch.softmax)(scores, dim=-1)[..., : key.shape[2]]
    return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous(), None


def attention(function: Callable[..., Any], mask: Any = "eager") -> AttentionBackend:
    found = AttentionBackend(attention=function, mask=mask)
    object.__setattr__(found, "__name__", function.__name__)
    object.__setattr__(found, "__doc__", function.__doc__)
    return found


right_attn = attention(attend)


@mutant("attn", "forward[float32-gqa]", "model/logits[float32-mixtral]")
@attention
def attention_scaled(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **how: Any) -> Any:
    """The output is 1% too large."""
    y, _ = attend(module, query, key, value, mask, **how)
    return y * 1.01, None


@mutant("attn", "forward[float32-sinks]", "grad/d_sinks[float32-sinks]", "model/logits[float32-gpt_oss]")
@attention
def sinks_ignored(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **how: Any) -> Any:
    """Attention sinks are left out."""
    return attend(module, query, key, value, mask, **how | {"s_aux": None})


def _causal(query: Tensor, key: Tensor, aligned: str = "right") -> Tensor:
    """The additive mask of causal attention alone."""
    queries, keys = query.shape[2], key.shape[2]
    offset = keys - queries if aligned == "right" else 0
    seen = torch.arange(keys)[None] <= torch.arange(queries)[:, None] + offset
    return torch.zeros(queries, keys).masked_fill(~seen, torch.finfo(torch.float32).min)


@mutant("attn", "forward[float32-sliding]", "forward[bfloat16-sinks_sliding]")
@attention
def window_ignored(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **how: Any) -> Any:
    """A sliding window is taken for full causal attention."""
    if how.get("sliding_window"):
        mask = _causal(query, key)
    return attend(module, query, key, value, mask, **how)


@mutant("attn", "padding/left[float32-gqa]", "packed[float32-gqa]", "grad/packed[float32-gqa]")
@attention
def mask_ignored(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **how: Any) -> Any:
    """Attention is causal, and the mask is not looked at."""
    return attend(module, query, key, value, _causal(query, key), **how)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


@mutant("attn", "padding/left[float32-gqa]", "packed[float32-gqa]")
@partial(attention, mask=_no_mask)
def mask_unregistered(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **how: Any) -> Any:
    """It is handed no mask, which Transformers does in silence under a name without a mask function."""
    return attend(module, query, key, value, _causal(query, key) if mask is None else mask, **how)


@mutant("attn", "padding/right[float32-bidirectional]", "padding/left[bfloat16-bidirectional]")
@attention
def padding_ignored(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **how: Any) -> Any:
    """Attention that is not causal sees padding."""
    return attend(module, query, key, value, mask if module.is_causal else None, **how)


@mutant("attn", "cache[float32-gqa]")
@attention
def aligned_left(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **how: Any) -> Any:
    """With cached keys the first query is taken to be the first token."""
    return attend(module, query, key, value, _causal(query, key, aligned="left"), **how)


@mutant("attn", "forward[float32-softcap]", "grad/dQ[float32-softcap]")
@attention
def softcap_dropped(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **how: Any) -> Any:
    """Scores are not capped."""
    return attend(module, query, key, value, mask, **how | {"softcap": None})


@mutant("attn", "forward[float32-gqa]", "forward[bfloat16-sinks]")
@attention
def heads_mixed(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **how: Any) -> Any:
    """Query heads go to key-value heads in turn instead of in groups."""
    groups = query.shape[1] // key.shape[1]
    return attend(module, query, key.repeat(1, groups, 1, 1), value.repeat(1, groups, 1, 1), mask, **how)


@mutant("attn", "forward[float32-mla]")
@attention
def value_head_scale(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **how: Any) -> Any:
    """Scores are scaled by the value heads' size."""
    return attend(module, query, key, value, mask, **how | {"scaling": value.shape[-1] ** -0.5})


@mutant(
    "attn", "grad/dQ[float32-gqa]", "grad/dK[bfloat16-gqa]", "grad/dV[float32-mla]", "model/gradients[float32-mixtral]"
)
@attention
def attention_gradients(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **how: Any) -> Any:
    """Gradients are 2% too large."""
    return attend(module, with_gradient(query), with_gradient(key), with_gradient(value), mask, **how)


def _bare_softmax(scores: Tensor, dim: int) -> Tensor:
    return scores.exp() / scores.exp().sum(dim, keepdim=True)


@mutant("attn", "edge/large_scores[float32-gqa]", "edge/large_scores[bfloat16-causal]")
@attention
def softmax_overflows(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **how: Any) -> Any:
    """The softmax does not take its maximum off."""
    return attend(module, query, key, value, mask, softmax=_bare_softmax, **how)


@mutant("attn", "mode/repeat[float32-gqa]")
@attention
def attention_random(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **how: Any) -> Any:
    """The last bit is random."""
    y, _ = attend(module, query, key, value, mask, **how)
    return noisy(y), None


def noisy(y: Tensor) -> Tensor:
    return y * (1 + torch.finfo(y.dtype).eps * torch.randint(0, 2, y.shape))


@mutant("attn", "mode/compile[float32-gqa]")
@attention
def attention_breaks(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **how: Any) -> Any:
    """The host looks at a value."""
    if query.abs().max().item() < 0:
        return query, None
    return attend(module, query, key, value, mask, **how)


@mutant("attn", "mode/switch[float32-gqa]")
@attention
def module_written(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **how: Any) -> Any:
    """The module's scaling is set to what the kernel wants, and stays so."""
    module.scaling = 1.0
    return attend(module, query, key, value, mask, **how)


# Linear layers.


class Converted(nn.Module):
    """Another module on the same parameters; `compute(weight, bias, x)` is a bug of its own."""

    def __init__(self, old: nn.Module, compute: Callable[..., Tensor]):
        super().__init__()
        for name, parameter in old.named_parameters():
            self.register_parameter(name, parameter)
        self.compute, self.eps = compute, getattr(old, "eps", getattr(old, "variance_epsilon", None))
        self.zero_centred = type(old).__name__ == "Qwen3NextRMSNorm"
        self.layer = type(old) is nn.LayerNorm
        self.rounds_first = type(old).__name__ == "Qwen3MoeRMSNorm"

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def affine(module: Any, x: Tensor) -> Tensor:
    return F.linear(x, module.weight, getattr(module, "bias", None))


def right_linear(old: nn.Module) -> nn.Module:
    return Converted(old, affine)


def converting(kind: str, *kills: str) -> Callable[[Any], Any]:
    """A mutant from the function that its modules compute."""

    def declare(compute: Any) -> Any:
        def convert(old: nn.Module) -> nn.Module:
            return Converted(old, compute)

        convert.__name__, convert.__doc__ = compute.__name__, compute.__doc__
        return mutant(kind, *kills)(convert)

    return declare


@converting("linear", "forward[float32-bias]", "forward[bfloat16-bias]", "grad/d_bias[float32-bias]")
def linear_bias_dropped(module: Any, x: Tensor) -> Tensor:
    """The bias is left out."""
    return F.linear(x, module.weight)


@converting(
    "linear", "forward[float32-plain]", "forward[bfloat16-plain]", "model/logits[float32-mixtral]",
)  # fmt: skip
def linear_scaled(module: Any, x: Tensor) -> Tensor:
    """The output is 1% too large."""
    return affine(module, x) * 1.01


@converting("linear", "grad/dX[bfloat16-plain]", "model/gradients[float32-mixtral]")
def linear_dx(module: Any, x: Tensor) -> Tensor:
    """dX is 2% too large."""
    return affine(module, with_gradient(x))


@converting("linear", "grad/d_weight[bfloat16-plain]", "grad/d_weight[float32-wide]")
def linear_dw(module: Any, x: Tensor) -> Tensor:
    """The weight's gradient is 2% too large."""
    return F.linear(x, with_gradient(module.weight), getattr(module, "bias", None))


@converting("linear", "edge/no_rows[float32-plain]")
def linear_nothing(module: Any, x: Tensor) -> Tensor:
    """The largest value is asked for, which no rows do not have."""
    x.abs().max()
    return affine(module, x)


@converting("linear", "edge/strided[float32-plain]")
def linear_strides(module: Any, x: Tensor) -> Tensor:
    """Inputs are read as if they were contiguous."""
    return affine(module, x.as_strided(x.shape, torch.empty(x.shape).stride()))


@converting("linear", "edge/scales[float32-plain]", "edge/scales[bfloat16-plain]")
def linear_saturates(module: Any, x: Tensor) -> Tensor:
    """Inputs are clamped to an FP8 range."""
    return affine(module, x.clamp(-448, 448))


@converting("linear", "mode/repeat[float32-plain]")
def linear_random(module: Any, x: Tensor) -> Tensor:
    """The last bit is random."""
    return noisy(affine(module, x))


@converting("linear", "mode/compile[float32-plain]")
def linear_breaks(module: Any, x: Tensor) -> Tensor:
    """The host looks at a value."""
    return affine(module, x) if x.abs().max().item() >= 0 else x


@converting("linear", "mode/autocast[float32-plain]")
def linear_autocast(module: Any, x: Tensor) -> Tensor:
    """Autocast is ignored."""
    with torch.autocast("cpu", enabled=False):
        return affine(module, x)


@converting("linear", "mode/switch[float32-plain]")
def linear_writes(module: Any, x: Tensor) -> Tensor:
    """The weight is rounded in place for the kernel, and stays so."""
    y = affine(module, x)
    with torch.no_grad():
        module.weight.copy_(module.weight.bfloat16())
    return y


@mutant("linear", "mode/copied[float32-plain]")
def linear_closure(old: nn.Module) -> nn.Module:
    """The forward closes over the original's weight."""
    return Converted(old, lambda module, x: affine(old, x))


# Norms.


def normalise(module: Any, x: Tensor, eps: float | None = None, inside: bool = True) -> Tensor:
    """What each stock norm computes, with its own rounding."""
    eps = module.eps if eps is None else eps
    if module.layer:
        return F.layer_norm(x, x.shape[-1:], module.weight, module.bias, eps)
    wide = x.float()
    square = wide.square().mean(-1, keepdim=True)
    wide = wide / ((square + eps).sqrt() if inside else square.sqrt() + eps)
    weight = getattr(module, "weight", None)
    if weight is None:
        return wide.to(x.dtype)
    if module.zero_centred:
        weight = 1 + weight.float()
    return weight * wide.to(x.dtype) if module.rounds_first else (weight * wide).to(x.dtype)


def right_norm(old: nn.Module) -> nn.Module:
    return Converted(old, normalise)


@converting("norm", "forward[bfloat16-rms]", "forward[bfloat16-rms_rounded_once]", "model/logits[float32-mixtral]")
def norm_scaled(module: Any, x: Tensor) -> Tensor:
    """The output is 1% too large."""
    return normalise(module, x) * 1.01


@converting("norm", "forward[float32-rms]", "edge/scales[bfloat16-rms]")
def eps_outside(module: Any, x: Tensor) -> Tensor:
    """eps stands outside the root."""
    return normalise(module, x, inside=False)


@converting("norm", "edge/scales[bfloat16-unweighted]", "forward[float32-layer_norm]")
def eps_fixed(module: Any, x: Tensor) -> Tensor:
    """eps is 1e-6 whatever the module says."""
    return normalise(module, x, eps=1e-6)


@converting("norm", "forward[float32-zero_centred]", "forward[bfloat16-zero_centred]")
def zero_centred_forgotten(module: Any, x: Tensor) -> Tensor:
    """Zero-centred weights are taken as they are."""
    y = normalise(module, x)
    return y / (1 + module.weight) * module.weight if module.zero_centred else y


@converting("norm", "grad/dX[bfloat16-rms]", "model/gradients[float32-mixtral]")
def norm_dx(module: Any, x: Tensor) -> Tensor:
    """dX is 2% too large."""
    return normalise(module, with_gradient(x))


@converting("norm", "grad/dX[float32-rms]")
def statistics_detached(module: Any, x: Tensor) -> Tensor:
    """The gradient takes the root mean square for a constant."""
    y = normalise(module, x)
    linear = y.detach() / torch.where(x == 0, 1, x.detach()) * x
    return y.detach() + (linear - linear.detach()) + 0 * y


@converting("norm", "grad/d_weight[bfloat16-rms]", "grad/d_bias[bfloat16-layer_norm]")
def norm_dw(module: Any, x: Tensor) -> Tensor:
    """The parameters' gradients are 2% too large."""
    names = dict(module.named_parameters())
    y = normalise(module, x)
    if not names:
        return y
    # y is linear in its parameters, so its gradient in them scales with a copy that only they see
    through = normalise(module, x.detach())
    return y + 0.02 * (through - through.detach())


@converting("norm", "edge/no_rows[float32-rms]")
def norm_nothing(module: Any, x: Tensor) -> Tensor:
    """The largest value is asked for, which no rows do not have."""
    x.abs().max()
    return normalise(module, x)


@converting("norm", "edge/strided[float32-rms]")
def norm_strides(module: Any, x: Tensor) -> Tensor:
    """Inputs are read as if they were contiguous."""
    return normalise(module, x.as_strided(x.shape, torch.empty(x.shape).stride()))


@converting("norm", "mode/repeat[float32-rms]")
def norm_random(module: Any, x: Tensor) -> Tensor:
    """The last bit is random."""
    return noisy(normalise(module, x))


@converting("norm", "mode/compile[float32-rms]")
def norm_breaks(module: Any, x: Tensor) -> Tensor:
    """The host looks at a value."""
    return normalise(module, x) if x.abs().max().item() >= 0 else x


@converting("norm", "mode/switch[float32-rms]")
def norm_writes(module: Any, x: Tensor) -> Tensor:
    """The weight is rounded in place for the kernel, and stays so."""
    y = normalise(module, x)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.bfloat16())
    return y


@mutant("norm", "mode/copied[float32-rms]")
def norm_closure(old: nn.Module) -> nn.Module:
    """The forward closes over the original's weight."""
    original = Converted(old, normalise)
    return Converted(old, lambda module, x: normalise(original, x))


# Losses.


def right_loss(logits: Tensor, labels: Any, vocab_size: int, **how: Any) -> Tensor:
    return ForCausalLMLoss(logits, labels, vocab_size, **how)


@mutant("loss", "num_items[float32-vocabulary_128]", "grad/d_logits[float32-vocabulary_128]")
def always_mean(logits: Tensor, labels: Any, vocab_size: int, **how: Any) -> Tensor:
    """The mean is taken where the sum over num_items_in_batch is asked for."""
    return right_loss(logits, labels, vocab_size, **how | {"num_items_in_batch": None})


def _own_loss(logits: Tensor, labels: Any, how: dict[str, Any], **bug: Any) -> Tensor:
    """Cross entropy by hand, with one thing wrong."""
    ignore = bug.get("ignore", how.get("ignore_index", -100))
    shifted = how.get("shift_labels")
    if shifted is None or bug.get("shifts_twice"):
        shifted = F.pad(labels if shifted is None else shifted, (0, 1), value=ignore)[..., 1:]
    rows, targets = logits.float().flatten(0, -2), shifted.flatten()
    counted = targets != ignore
    if bug.get("counts_all"):
        counted = torch.ones_like(counted)
    top = 0 if bug.get("bare") else rows.detach().max(-1, keepdim=True).values
    total = (rows - top).exp().sum(-1).log() + (0 if bug.get("bare") else top[:, 0])
    losses = (total - rows.gather(1, targets.clamp(0)[:, None])[:, 0]) * counted
    items = how.get("num_items_in_batch")
    return losses.sum() / (counted.sum() if items is None else items)


@mutant("loss", "forward[float32-vocabulary_128]", "grad/ignored[float32-vocabulary_128]")
def ignored_counted(logits: Tensor, labels: Any, vocab_size: int, **how: Any) -> Tensor:
    """Labels that do not count are taken for label 0."""
    return _own_loss(logits, labels, how, counts_all=True)


@mutant("loss", "ignore_index[float32-vocabulary_128]")
def ignore_fixed(logits: Tensor, labels: Any, vocab_size: int, **how: Any) -> Tensor:
    """The label that does not count is -100 whatever is asked for."""
    return _own_loss(logits, labels, how, ignore=-100)


@mutant("loss", "shift_labels[float32-vocabulary_128]")
def shifts_twice(logits: Tensor, labels: Any, vocab_size: int, **how: Any) -> Tensor:
    """Labels that are shifted already are shifted again."""
    return _own_loss(logits, labels, how, shifts_twice=True)


@mutant("loss", "edge/large_logits[float32-vocabulary_128]")
def loss_overflows(logits: Tensor, labels: Any, vocab_size: int, **how: Any) -> Tensor:
    """The softmax does not take its maximum off."""
    return _own_loss(logits, labels, how, bare=True)


@mutant("loss", "forward[bfloat16-vocabulary_5003]")
def loss_in_bfloat16(logits: Tensor, labels: Any, vocab_size: int, **how: Any) -> Tensor:
    """The loss is computed in the logits' dtype."""
    return right_loss(torch.log_softmax(logits, -1), labels, vocab_size, **how)


@mutant("loss", "grad/d_logits[bfloat16-vocabulary_128]")
def loss_gradient(logits: Tensor, labels: Any, vocab_size: int, **how: Any) -> Tensor:
    """The gradient is 2% too large."""
    return right_loss(with_gradient(logits), labels, vocab_size, **how)


@mutant("loss", "mode/repeat[float32-vocabulary_128]")
def loss_random(logits: Tensor, labels: Any, vocab_size: int, **how: Any) -> Tensor:
    """The last bit of the logits is random."""
    return right_loss(noisy(logits), labels, vocab_size, **how)


@mutant("loss", "mode/compile[float32-vocabulary_128]")
def loss_breaks(logits: Tensor, labels: Any, vocab_size: int, **how: Any) -> Tensor:
    """The host looks at a value."""
    if math.isnan(logits.abs().max().item()):
        return logits.sum()
    return right_loss(logits, labels, vocab_size, **how)


def fused(*kills: str) -> Callable[[Any], FusedLoss]:
    """A mutant of `fused_right`, the formula of `FusedLoss` in so many words."""

    def declare(function: Any) -> FusedLoss:
        return FusedLoss(function=mutant("loss", *kills)(function))

    return declare


def fused_formula(hidden: Tensor, weight: Tensor, labels: Tensor, **how: Any) -> Tensor:
    value = F.linear(hidden, weight, how["bias"]).float() * how["scale"]
    if how["softcap"] is not None:
        value = how["softcap"] * torch.tanh(value / how["softcap"])
    items = how["num_items"]
    reduction = "mean" if items is None else "sum"
    loss = F.cross_entropy(value, labels, ignore_index=how["ignore_index"], reduction=reduction)
    return loss if items is None else loss / items


fused_right = FusedLoss(function=fused_formula)


@fused("capped[float32-vocabulary_128]", "grad/d_logits[float32-vocabulary_128]")
def fused_uncapped(hidden: Tensor, weight: Tensor, labels: Tensor, **how: Any) -> Tensor:
    """The cap is forgotten."""
    return fused_formula(hidden, weight, labels, **how | {"softcap": None})


@fused("capped[float32-vocabulary_128]")
def fused_unscaled(hidden: Tensor, weight: Tensor, labels: Tensor, **how: Any) -> Tensor:
    """The scale is forgotten."""
    return fused_formula(hidden, weight, labels, **how | {"scale": 1.0})


@fused("forward[float32-vocabulary_5003]", "grad/d_logits[bfloat16-vocabulary_5003]")
def fused_unbiased(hidden: Tensor, weight: Tensor, labels: Tensor, **how: Any) -> Tensor:
    """The head's bias is forgotten."""
    return fused_formula(hidden, weight, labels, **how | {"bias": None if how["bias"] is None else 0 * how["bias"]})


@fused("grad/d_logits[bfloat16-vocabulary_128]", "grad/d_logits[float32-vocabulary_5003]")
def fused_weight_gradient(hidden: Tensor, weight: Tensor, labels: Tensor, **how: Any) -> Tensor:
    """The gradient of the head's weight is 2% too large."""
    return fused_formula(hidden, with_gradient(weight), labels, **how)


@fused("forward[float32-vocabulary_128]", "shift_labels[float32-vocabulary_128]")
def fused_first_chunk(hidden: Tensor, weight: Tensor, labels: Tensor, **how: Any) -> Tensor:
    """Tokens after the first chunk of 1024 are forgotten."""
    labels = labels.where(torch.arange(labels.shape[0], device=labels.device) < 1024, how["ignore_index"])
    return fused_formula(hidden, weight, labels, **how)


_CROSS_ENTROPY = F.cross_entropy


@mutant("loss", "mode/switch[float32-vocabulary_128]")
def patches_torch(logits: Tensor, labels: Any, vocab_size: int, **how: Any) -> Tensor:
    """torch's own cross entropy is replaced for everybody."""
    y = right_loss(logits, labels, vocab_size, **how)
    F.cross_entropy = lambda *args, **kwargs: 2 * _CROSS_ENTROPY(*args, **kwargs)
    return y
