"""Gates and norms recognised by what they compute.

A class name says little across 70 model families, and a fused kernel must know the formula exactly. So the module's
own code is evaluated on a few small CPU inputs and compared with the known formulas. What matches none of them is
`custom`, and a fused backend says no to it.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOLERANCE = 1e-6
"""Relative to the largest expected value. Wide enough for a module that computes in float32 inside, narrow enough to
tell the exact from the tanh-approximated GELU (1e-4 apart)."""


FAR = 1e4
"""Further than any activation goes: what a gate clamps beyond is not seen."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """What an experts module does between its two projections, with `g`, `u` the gate and up halves.

    | formula | value |
    |---|---|
    | `swiglu`, `geglu`, `geglu_tanh`, `reglu` | `act(g) * u` |
    | `swiglu_clamped` | `silu(min(g, limit)) * clamp(u, -limit, limit)` |
    | `swiglu_clamped_after` | `min(silu(g), limit) * clamp(u, -limit, limit)` |
    | `gpt_oss` | `g' * sigmoid(alpha * g') * (u' + 1)` with the clamps of `swiglu_clamped` |
    | `silu`, `gelu`, `gelu_tanh`, `relu`, `relu2` | `act(u)`, for experts without a gate |
    | `custom` | none of these |
    """

    formula: str
    limit: float = math.inf
    alpha: float = 1.0

    def __str__(self) -> str:
        numbers = [f"limit={self.limit:g}"] if math.isfinite(self.limit) else []
        numbers += [f"alpha={self.alpha:g}"] if self.alpha != 1.0 else []
        return f"{self.formula}({', '.join(numbers)})" if numbers else self.formula


@dataclass(frozen=True, kw_only=True)
class Norm:
    """What a norm computes over the last dimension.

    `formula` is `rms`, `layer` or `custom`. `zero_centred` norms multiply by `1 + weight`. `cast_before_weight` tells
    the order in half precision: True rounds the normalised value to the input's dtype and then multiplies, False
    multiplies in float32 and rounds once. An RMSNorm that does neither is `custom`.
    """

    formula: str
    eps: float = 0.0
    weighted: bool = True
    zero_centred: bool = False
    cast_before_weight: bool = False


def _silu_up_to(limit: float, gate: Tensor) -> Tensor:
    return F.silu(gate.clamp(max=limit))


def _silu_cut_at(limit: float, gate: Tensor) -> Tensor:
    return F.silu(gate).clamp(max=limit)


def _sigmoid_up_to(limit: float, alpha: float, gate: Tensor) -> Tensor:
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate)


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
_GLU_NAMES = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "relu": "reglu"}


def recognise_gate(experts: nn.Module) -> Gate:
    """The gate of an experts module, decorated or with the decorator's defaults.

    Never raises; never runs on the module's device or weights.
    """
    try:
        with _aside():
            if not getattr(experts, "has_gate", True):
                return _recognise_activation(getattr(experts, "act_fn"))  # noqa: B009 - a module types it as Tensor | Module
            return _recognise_glu(partial(_call_gate, experts))
    except Exception:  # a gate that cannot be called like this is none that we know
        return Gate(formula="custom")


@contextmanager
def _aside() -> Iterator[None]:
    """Without a graph, and without using up random numbers: a gate may have dropout in it."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        yield


def _call_gate(experts: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
    """The module's `_apply_gate` on n pairs: gate (n,), up (n,) -> (n,)."""
    if getattr(experts, "is_concatenated", True):
        joined = torch.cat([gate, up])
    else:
        joined = torch.stack([gate, up], dim=-1).flatten()
    return experts._apply_gate(joined[None])[0]  # type: ignore[operator, no-any-return]


def _recognise_activation(activation: Callable[[Tensor], Tensor]) -> Gate:
    grids = _grids(FAR)
    got = [activation(x) for x in grids]
    for name, known in ACTIVATIONS.items():
        if all(map(_close, got, map(known, grids))):
            return Gate(formula=name)
    return Gate(formula="custom")


def _recognise_glu(call: Callable[[Tensor, Tensor], Tensor]) -> Gate:
    # Every known gate is a(g) * (clamp(u, -limit, limit) + offset). A few points tell offset, limit and alpha; the
    # grids below then decide, so a wrong guess can only end in "custom".
    at_zero, at_one, at_far = call(_row(1.0, 1.0, 1.0), _row(0.0, 1.0, FAR)).tolist()
    slope = at_one - at_zero
    offset = at_zero / slope
    limit = at_far / slope - offset
    limit = math.inf if limit > 0.99 * FAR else _round(limit)
    alpha = _round(math.log(slope / (1 - slope))) if 0 < slope < 1 else 1.0

    candidates: dict[Gate, tuple[Callable[[Tensor], Tensor], float]] = {}
    if math.isinf(limit):
        for activation, name in _GLU_NAMES.items():
            candidates[Gate(formula=name)] = (ACTIVATIONS[activation], 0.0)
    else:
        candidates[Gate(formula="swiglu_clamped", limit=limit)] = (partial(_silu_up_to, limit), 0.0)
        candidates[Gate(formula="swiglu_clamped_after", limit=limit)] = (partial(_silu_cut_at, limit), 0.0)
    candidates[Gate(formula="gpt_oss", limit=limit, alpha=alpha)] = (partial(_sigmoid_up_to, limit, alpha), 1.0)

    grids = _grids(FAR if math.isinf(limit) else 3 * limit)
    mixed = torch.randperm(grids[0].numel(), generator=torch.Generator().manual_seed(0), device="cpu")
    got = [call(gate, gate[mixed]) for gate in grids]
    for candidate, (activation_fn, plus) in candidates.items():
        expected = [activation_fn(gate) * (gate[mixed].clamp(-limit, limit) + plus) for gate in grids]
        if all(map(_close, got, expected)):
            return candidate
    return Gate(formula="custom")


def recognise_norm(norm: nn.Module) -> Norm:
    """The formula of a norm: a module with at most a 1-D `weight` and `bias` and a forward of one argument.

    Its own weights are not read, so it works on the meta device and on sharded models. Never raises.
    """
    try:
        with _aside():
            return _recognise_norm(norm)
    except Exception:  # as above: what cannot be called like this is custom
        return Norm(formula="custom")


def _recognise_norm(norm: nn.Module) -> Norm:
    required = [
        p
        for p in list(inspect.signature(type(norm).forward).parameters.values())[1:]
        if p.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    if len(required) != 1:  # a gated norm is another function even when its gate is optional
        return Norm(formula="custom")
    shapes = {name: getattr(p, "ds_shape", p.shape) for name, p in norm.named_parameters(recurse=False)}
    width = next((shape[-1] for shape in shapes.values()), 64)
    made: Any = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float32, "device": "cpu"}
    weights = {name: torch.rand(tuple(shape), **made) + 0.5 for name, shape in shapes.items()}
    x = torch.randn(4, width, **made)
    small = 1e-3 * x  # makes eps visible: y = w * x / sqrt(mean(x^2) + eps)

    def call(x: Tensor) -> Tensor:
        clone = copy.copy(norm)  # a stand-in with weights of its own
        # FSDP leaves views of freed memory in the place of parameters, and reading them is a crash
        clone.__dict__ = {name: value for name, value in vars(norm).items() if not isinstance(value, Tensor)}
        clone.__dict__["_parameters"] = {n: nn.Parameter(w.to(x.dtype), False) for n, w in weights.items()}
        output: Tensor = type(norm).forward(clone, x)
        return output

    if weights.keys() == {"weight", "bias"}:
        scale, bias = weights["weight"], weights["bias"]
        eps = _solve_eps(norm, small - small.mean(-1, keepdim=True), scale, call(small) - bias)
        if all(_close(call(v), F.layer_norm(v, (width,), scale, bias, eps), 1e-5) for v in (x, small)):
            return Norm(formula="layer", eps=eps)
        return Norm(formula="custom")
    if weights.keys() - {"weight"}:
        return Norm(formula="custom")

    for zero_centred in (False, True):
        scale = weights["weight"] + zero_centred if weights else torch.ones(width, dtype=torch.float32, device="cpu")
        eps = _solve_eps(norm, small, scale, call(small))
        if all(_close(call(v), scale * _rms(v, eps), 1e-5) for v in (x, small)):
            rounds_first = _rounds_first(call, x, weights.get("weight"), zero_centred, eps)
            if rounds_first is None:
                break
            return Norm(
                formula="rms",
                eps=eps,
                weighted=bool(weights),
                zero_centred=zero_centred,
                cast_before_weight=rounds_first,
            )
    return Norm(formula="custom")


def _rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _rounds_first(
    call: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor | None, zero_centred: bool, eps: float
) -> bool | None:
    """In half precision: whether it rounds before its weight (True), once at the end (False), or otherwise (None)."""
    half = x.bfloat16()
    got, normed = call(half), _rms(half.float(), eps)
    if got.dtype != half.dtype:
        return None
    once = [normed]
    if weight is not None:
        weight = weight.bfloat16()
        if torch.equal(got, normed.bfloat16() * (weight + zero_centred)):
            return True
        once = [normed * (weight.float() + zero_centred), normed * (weight + zero_centred)]
    # but for one element in a hundred: float32 products in another order tip a rounding now and then
    few = 1 + 0.01 * got.numel()
    return False if any((got != value.bfloat16()).sum() <= few for value in once) else None


def _solve_eps(norm: nn.Module, x: Tensor, scale: Tensor, y: Tensor) -> float:
    """The eps in y = scale * x / sqrt(mean(x^2) + eps), as the module's own attribute where it has one."""
    x = x.double()
    found = (scale * x / y).square() - x.square().mean(-1, keepdim=True)
    return _nearest_attribute(norm, found.median().item())


def _nearest_attribute(norm: nn.Module, value: float) -> float:
    """The module's own attribute that is `value` up to the error of solving for it, or `value` itself."""
    for found in vars(norm).values():
        if isinstance(found, float) and math.isclose(found, value, rel_tol=0.02, abs_tol=1e-11):
            return found
    return max(value, 0.0)


def _grids(reach: float) -> list[Tensor]:
    """A wide grid, that sees clamps, and a narrow one for the shape around zero, which large values would hide."""
    return [torch.linspace(-r, r, 257, dtype=torch.float64, device="cpu") for r in (8.0, reach)]


def _row(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _round(value: float) -> float:
    """Undo the last digits that solving for a constant costs."""
    return float(f"{value:.5g}")


def _close(got: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> bool:
    error = (got.double() - expected.double()).abs().max()
    return got.shape == expected.shape and bool(error <= tolerance * expected.double().abs().max())
