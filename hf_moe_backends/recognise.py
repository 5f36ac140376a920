"""Gates and norms recognised by what they compute.

A class name says little across 70 model families, and a fused kernel must know the formula exactly. So the module's
own code is evaluated on a few small CPU inputs and compared with the known formulas. What matches none of them is
`custom`, and a fused backend says no to it.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOLERANCE = 1e-6
"""Relative to the largest expected value. Wide enough for a module that computes in float32 inside, narrow enough to
tell the exact from the tanh-approximated GELU (1e-4 apart)."""


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
        if math.isinf(self.limit):
            return self.formula
        alpha = f", alpha={self.alpha:g}" if self.alpha != 1.0 else ""
        return f"{self.formula}(limit={self.limit:g}{alpha})"


@dataclass(frozen=True, kw_only=True)
class Norm:
    """What a norm computes over the last dimension.

    `formula` is `rms`, `layer` or `custom`. `zero_centred` norms multiply by `1 + weight`. `cast_before_weight` tells
    the order in half precision: True rounds the normalised value to the input's dtype and then multiplies, False
    multiplies in float32 and rounds once.
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
        with torch.no_grad():
            if not getattr(experts, "has_gate", True):
                return _recognise_activation(getattr(experts, "act_fn"))  # noqa: B009 - a module types it as Tensor | Module
            return _recognise_glu(partial(_call_gate, experts))
    except Exception:  # a gate that cannot be called like this is none that we know
        return Gate(formula="custom")


def _call_gate(experts: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
    """The module's `_apply_gate` on n pairs: gate (n,), up (n,) -> (n,)."""
    if getattr(experts, "is_concatenated", True):
        joined = torch.cat([gate, up])
    else:
        joined = torch.stack([gate, up], dim=-1).flatten()
    return experts._apply_gate(joined[None])[0]  # type: ignore[operator, no-any-return]


def _recognise_activation(activation: Callable[[Tensor], Tensor]) -> Gate:
    x = _grid(8.0)
    for name, known in ACTIVATIONS.items():
        if _close(activation(x), known(x)):
            return Gate(formula=name)
    return Gate(formula="custom")


def _recognise_glu(call: Callable[[Tensor, Tensor], Tensor]) -> Gate:
    # Every known gate is a(g) * (clamp(u, -limit, limit) + offset). A few points tell offset, limit and alpha; the grid
    # below then decides, so a wrong guess can only end in "custom".
    far = 1e4
    at_zero, at_one, at_far = call(_row(1.0, 1.0, 1.0), _row(0.0, 1.0, far)).tolist()
    slope = at_one - at_zero
    offset = at_zero / slope
    limit = at_far / slope - offset
    limit = math.inf if limit > 0.99 * far else _round(limit)
    alpha = _round(math.log(slope / (1 - slope))) if 0 < slope < 1 else 1.0

    candidates: dict[Gate, tuple[Callable[[Tensor], Tensor], float]] = {}
    if math.isinf(limit):
        for activation, name in _GLU_NAMES.items():
            candidates[Gate(formula=name)] = (ACTIVATIONS[activation], 0.0)
    else:
        candidates[Gate(formula="swiglu_clamped", limit=limit)] = (partial(_silu_up_to, limit), 0.0)
        candidates[Gate(formula="swiglu_clamped_after", limit=limit)] = (partial(_silu_cut_at, limit), 0.0)
    candidates[Gate(formula="gpt_oss", limit=limit, alpha=alpha)] = (partial(_sigmoid_up_to, limit, alpha), 1.0)

    reach = 8.0 if math.isinf(limit) else 3 * limit
    gate = _grid(reach)
    up = gate[torch.randperm(gate.numel(), generator=torch.Generator().manual_seed(0), device="cpu")]
    got = call(gate, up)
    for candidate, (activation_fn, plus) in candidates.items():
        if _close(got, activation_fn(gate) * (up.clamp(-limit, limit) + plus)):
            return candidate
    return Gate(formula="custom")


def recognise_norm(norm: nn.Module) -> Norm:
    """The formula of a norm: a module with at most a 1-D `weight` and `bias` and a forward of one argument.

    Its own weights are not read, so it works on the meta device and on sharded models. Never raises.
    """
    try:
        with torch.no_grad():
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
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.rand(tuple(shape), generator=generator, device="cpu") + 0.5 for name, shape in shapes.items()
    }
    x = torch.randn(4, width, generator=generator, device="cpu")

    def call(x: Tensor) -> Tensor:
        clone = copy.copy(norm)  # a stand-in without the module's weights, hooks and instance forward
        # tensors included: FSDP leaves views of freed memory in the place of parameters, and reading them is a crash
        clone.__dict__ = {
            k: v
            for k, v in vars(norm).items()
            if k != "forward" and not k.endswith("_hooks") and not isinstance(v, Tensor)
        }
        clone.__dict__["_parameters"] = {n: nn.Parameter(w.to(x.dtype), False) for n, w in weights.items()}
        output: Tensor = type(norm).forward(clone, x)
        return output

    if set(weights) == {"weight", "bias"}:
        eps = float(getattr(norm, "eps", 0.0))
        expected = F.layer_norm(x, (width,), weights["weight"], weights["bias"], eps)
        return Norm(formula="layer", eps=eps) if _close(call(x), expected) else Norm(formula="custom")
    if set(weights) - {"weight"}:
        return Norm(formula="custom")

    # Small inputs make eps visible: y = w * x / sqrt(mean(x^2) + eps).
    small = 1e-3 * x
    for zero_centred in (False, True):
        scale = weights["weight"] + zero_centred if weights else torch.ones(width, device="cpu")
        mean_square = small.double().square().mean(-1, keepdim=True)
        solved = ((scale * small).double() / call(small).double()).square() - mean_square
        eps = _nearest_attribute(norm, solved.median().item())
        expected, expected_small = (
            scale * (v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)) for v in (x, small)
        )
        if _close(call(x), expected, 1e-5) and _close(call(small), expected_small, 1e-5):
            return Norm(
                formula="rms",
                eps=eps,
                weighted=bool(weights),
                zero_centred=zero_centred,
                cast_before_weight=bool(weights) and _casts_before_weight(call, x, scale, eps),
            )
    return Norm(formula="custom")


def _casts_before_weight(call: Callable[[Tensor], Tensor], x: Tensor, scale: Tensor, eps: float) -> bool:
    half = x.bfloat16()
    normed = half.float() * torch.rsqrt(half.float().square().mean(-1, keepdim=True) + eps)
    rounded_first = normed.bfloat16() * scale.bfloat16()
    return torch.equal(call(half).bfloat16(), rounded_first)


def _nearest_attribute(norm: nn.Module, value: float) -> float:
    """The module's own attribute that is `value` up to the error of solving for it, or `value` itself."""
    for found in vars(norm).values():
        if isinstance(found, float) and math.isclose(found, value, rel_tol=0.02, abs_tol=1e-11):
            return found
    return max(value, 0.0)


def _grid(reach: float) -> Tensor:
    return torch.linspace(-reach, reach, 257, dtype=torch.float64, device="cpu")


def _row(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _round(value: float) -> float:
    """Undo the last digits that solving for a constant costs."""
    return float(f"{value:.5g}")


def _close(got: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> bool:
    error = (got.double() - expected.double()).abs().max()
    return bool(error <= tolerance * expected.double().abs().max())
