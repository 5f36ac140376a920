"""Gates and norms are told by what they compute: every known formula, and what only looks like one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, sigmoid, silu

from hf_moe_backends.recognise import Gate, Norm, recognise_gate, recognise_norm

CUSTOM = Gate(formula="custom")

GateFunction = Callable[[Tensor, Tensor], Tensor]


class Experts(nn.Module):
    """What `recognise_gate` sees of an experts module."""

    has_gate = True

    def __init__(self, function: GateFunction, interleaved: bool = False):
        super().__init__()
        self.function, self.is_concatenated = function, not interleaved

    def _apply_gate(self, pre: Tensor) -> Tensor:
        gate, up = pre.chunk(2, dim=-1) if self.is_concatenated else (pre[..., ::2], pre[..., 1::2])
        return self.function(gate, up)


class Ungated(nn.Module):
    has_gate = False

    def __init__(self, activation: Callable[[Tensor], Tensor]):
        super().__init__()
        self.act_fn = activation


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def clamped(limit: float) -> GateFunction:
    return lambda g, u: silu(g.clamp(max=limit)) * u.clamp(-limit, limit)


def clamped_after(limit: float) -> GateFunction:
    return lambda g, u: silu(g).clamp(max=limit) * u.clamp(-limit, limit)


def gpt_oss(limit: float, alpha: float, offset: float = 1.0) -> GateFunction:
    def function(gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * sigmoid(alpha * gate) * (up + offset)

    return function


# Written out where the recogniser itself uses torch's function.
KNOWN: list[tuple[Gate, GateFunction]] = [
    (Gate(formula="swiglu"), lambda g, u: g * sigmoid(g) * u),
    (Gate(formula="geglu"), lambda g, u: 0.5 * g * (1 + torch.erf(g / math.sqrt(2))) * u),
    (Gate(formula="geglu_tanh"), lambda g, u: gelu_tanh(g) * u),
    (Gate(formula="reglu"), lambda g, u: g * (g > 0) * u),
    (Gate(formula="swiglu_clamped", limit=7.0), clamped(7.0)),
    (Gate(formula="swiglu_clamped", limit=2.5), clamped(2.5)),
    (Gate(formula="swiglu_clamped", limit=100.0), clamped(100.0)),
    (Gate(formula="swiglu_clamped_after", limit=7.0), clamped_after(7.0)),
    (Gate(formula="gpt_oss", limit=7.0, alpha=1.702), gpt_oss(7.0, 1.702)),
    (Gate(formula="gpt_oss", limit=12.0, alpha=1.0), gpt_oss(12.0, 1.0)),
    (Gate(formula="gpt_oss", alpha=1.702), gpt_oss(math.inf, 1.702)),
]

NEAR_MISSES: dict[str, GateFunction] = {
    "halves swapped": lambda g, u: silu(u) * g,
    "gate only": lambda g, u: silu(g),
    "gate twice": lambda g, u: silu(g) * u * u,
    "scaled by 1.00001": lambda g, u: silu(g) * u * 1.00001,
    "shifted by 1e-3": lambda g, u: silu(g) * u + 1e-3,
    "quick gelu": lambda g, u: g * sigmoid(1.702 * g) * u,
    "sigmoid": lambda g, u: sigmoid(g) * u,
    "tanh": lambda g, u: torch.tanh(g) * u,
    "leaky relu": lambda g, u: F.leaky_relu(g, 1e-4) * u,
    "relu squared": lambda g, u: relu(g).square() * u,
    "mish": lambda g, u: F.mish(g) * u,
    "softmax over the gate": lambda g, u: torch.softmax(g, -1) * u,
    "its neighbour's up": lambda g, u: silu(g) * u.roll(1, -1),
    "gate clamped, up not": lambda g, u: silu(g.clamp(max=7)) * u,
    "up clamped, gate not": lambda g, u: silu(g) * u.clamp(-7, 7),
    "up clamped above only": lambda g, u: silu(g.clamp(max=7)) * u.clamp(max=7),
    "up clamped below only": lambda g, u: silu(g.clamp(max=7)) * u.clamp(min=-7),
    "gate clamped below as well": lambda g, u: silu(g.clamp(-7, 7)) * u.clamp(-7, 7),
    "gate clamped, up not, far out": lambda g, u: silu(g.clamp(max=90)) * u,
    "up clamped above only, far out": lambda g, u: silu(g.clamp(max=90)) * u.clamp(max=90),
    "gate clamped elsewhere, far out": lambda g, u: silu(g.clamp(max=80)) * u.clamp(-90, 90),
    "two limits": lambda g, u: silu(g.clamp(max=7)) * u.clamp(-6, 6),
    "clamped product": lambda g, u: (silu(g) * u).clamp(-7, 7),
    "clamped geglu": lambda g, u: gelu(g.clamp(max=7)) * u.clamp(-7, 7),
    "clamped with an alpha": lambda g, u: gpt_oss(7.0, 1.702, offset=0.0)(g, u),
    "offset 0.5": gpt_oss(7.0, 1.702, offset=0.5),
    "offset before the clamp": lambda g, u: silu(g.clamp(max=7)) * (u + 1).clamp(-7, 7),
    "up from far away": lambda g, u: silu(g) * u * (u.abs() < 100),
    "another shape around zero": lambda g, u: clamped(70.0)(g, u) + 1e-3 * (g.abs() < 1),
    "offset with gelu": lambda g, u: gelu(g.clamp(max=7)) * (u.clamp(-7, 7) + 1),
    "rounded to bfloat16": lambda g, u: (silu(g) * u).bfloat16(),
    "another gate far from zero": lambda g, u: torch.where(g.abs() > 6, g, silu(g)) * u,
    "not finite": lambda g, u: silu(g) * u / 0,
    "another shape": lambda g, u: (silu(g) * u).sum(-1),
    "too many columns": lambda g, u: torch.cat([silu(g) * u] * 2, -1),
    "raises": lambda g, u: g @ u,
    "returns a tuple": lambda g, u: (silu(g) * u, None),  # type: ignore[dict-item,return-value]
    "needs a GPU": lambda g, u: silu(g).to("meta") * u.to("meta"),
}


class TestGate:
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize(("gate", "function"), KNOWN, ids=[str(gate) for gate, _ in KNOWN])
    def test_known(self, gate: Gate, function: GateFunction, interleaved: bool) -> None:
        assert recognise_gate(Experts(function, interleaved)) == gate

    def test_computed_in_float32(self) -> None:
        """beam and openai_privacy_filter do."""
        assert recognise_gate(Experts(lambda g, u: silu(g.float()) * u.float())) == Gate(formula="swiglu")

    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("name", NEAR_MISSES)
    def test_near_misses(self, name: str, interleaved: bool) -> None:
        assert recognise_gate(Experts(NEAR_MISSES[name], interleaved)) == CUSTOM

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_read_in_the_other_order(self, interleaved: bool) -> None:
        """A module whose flag says the opposite of what its code does."""
        experts = Experts(lambda g, u: silu(g) * u, interleaved)

        def other_order(pre: Tensor) -> Tensor:
            gate, up = (pre[..., ::2], pre[..., 1::2]) if experts.is_concatenated else pre.chunk(2, dim=-1)
            return silu(gate) * up

        experts._apply_gate = other_order  # type: ignore[method-assign]
        assert recognise_gate(experts) == CUSTOM

    @pytest.mark.parametrize(
        ("formula", "activation"),
        [
            ("silu", lambda x: x * sigmoid(x)),
            ("gelu", nn.GELU()),
            ("gelu_tanh", gelu_tanh),
            ("relu", nn.ReLU()),
            ("relu2", lambda x: relu(x) ** 2),
            ("custom", lambda x: x * sigmoid(1.702 * x)),
            ("custom", lambda x: x.square()),
            ("custom", lambda x: silu(x).clamp(max=50)),
            ("custom", lambda x: relu(x) ** 3),
            ("custom", lambda x: silu(x) * 1.00001),
            ("custom", lambda x: x),
            ("custom", lambda x, y: x * y),
            ("custom", None),
        ],
    )
    def test_ungated(self, formula: str, activation: Any) -> None:
        assert recognise_gate(Ungated(activation)) == Gate(formula=formula)

    def test_an_activation_of_a_gated_module_is_not_asked(self) -> None:
        """Only `_apply_gate` says what a gated module computes."""
        experts = Experts(lambda g, u: sigmoid(g) * u)
        experts.act_fn = nn.SiLU()
        assert recognise_gate(experts) == CUSTOM

    def test_a_module_without_a_gate_at_all(self) -> None:
        assert recognise_gate(nn.Identity()) == CUSTOM
        assert recognise_gate(nn.Linear(2, 2)) == CUSTOM

    def test_words(self) -> None:
        assert str(Gate(formula="swiglu")) == "swiglu"
        assert str(Gate(formula="swiglu_clamped", limit=7.0)) == "swiglu_clamped(limit=7)"
        assert str(Gate(formula="gpt_oss", limit=7.0, alpha=1.702)) == "gpt_oss(limit=7, alpha=1.702)"
        assert str(Gate(formula="gpt_oss", alpha=1.702)) == "gpt_oss(alpha=1.702)"


class Weighted(nn.Module):
    """A norm with what most of them hold."""

    def __init__(self, width: int = 24, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def rms(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


class Llama(Weighted):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.weight * self.rms(hidden_states.float()).to(hidden_states.dtype)


class Olmo(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * self.rms(x.float())).to(x.dtype)


class Gemma(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        return (self.rms(x.float()) * (1.0 + self.weight.float())).type_as(x)


class GemmaRoundedFirst(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        return self.rms(x.float()).to(x.dtype) * (1.0 + self.weight)


class MuseSpark(Weighted):
    """Rounds 1 + weight, which a fused norm adds in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.rms(x.float()) * (1.0 + self.weight).float()).type_as(x)


class Unweighted(nn.Module):
    def __init__(self, eps: float = 1e-6):
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Layer(Weighted):
    """LayerNorm, with its eps under another name than torch's."""

    def __init__(self, width: int = 24, eps: float = 1e-6):
        super().__init__(width, eps)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return self.rms(centred) * self.weight + self.bias


def variant(base: type[nn.Module], forward: Callable[..., Tensor]) -> nn.Module:
    """A norm of `base` with another forward."""
    return type("Variant", (base,), {"forward": forward})()


def computing(formula: Callable[[Any, Tensor], Tensor], base: type[nn.Module] = Weighted) -> nn.Module:
    """A norm that computes `formula` in float32 and rounds once: nothing but the formula is wrong with it."""
    return variant(base, lambda self, x: formula(self, x.float()).to(x.dtype))


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


NOT_KNOWN: dict[str, Callable[[], nn.Module]] = {
    "mean subtracted": lambda: computing(lambda self, x: self.weight * self.rms(centred(x))),
    "no mean": lambda: computing(lambda self, x: self.weight * F.normalize(x, dim=-1)),
    "eps outside the root": lambda: computing(
        lambda self, x: self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-3)
    ),
    "eps as a floor": lambda: computing(
        lambda self, x: self.weight * x * x.square().mean(-1, keepdim=True).clamp_min(1e-6).rsqrt()
    ),
    "weight squared": lambda: computing(lambda self, x: self.weight**2 * self.rms(x)),
    "weight ignored": lambda: computing(lambda self, x: self.rms(x)),
    "weight less one": lambda: computing(lambda self, x: (self.weight - 1) * self.rms(x)),
    "scaled by 1.0001": lambda: computing(lambda self, x: 1.0001 * self.weight * self.rms(x)),
    "over the first dimension": lambda: computing(
        lambda self, x: self.weight * x * (x.square().mean(0) + 1e-6).rsqrt()
    ),
    "in groups": lambda: computing(lambda self, x: self.weight * self.rms(x.unflatten(-1, (2, -1))).flatten(-2)),
    "RMS with a bias": lambda: computing(lambda self, x: self.weight * self.rms(x) + self.bias, Layer),
    "LayerNorm without weights": lambda: nn.LayerNorm(24, elementwise_affine=False),
    "LayerNorm without a bias": lambda: nn.LayerNorm(24, bias=False),
    "LayerNorm with its bias first": lambda: computing(
        lambda self, x: self.weight * (self.rms(centred(x)) + self.bias), Layer
    ),
    "LayerNorm with Bessel's correction": lambda: computing(
        lambda self, x: self.weight * centred(x) / x.std(-1, keepdim=True) + self.bias, Layer
    ),
    "LayerNorm with eps as a floor": lambda: computing(
        lambda self, x: self.weight * centred(x) * x.var(-1, False, keepdim=True).clamp_min(1e-6).rsqrt() + self.bias,
        Layer,
    ),
    "gated": lambda: variant(Llama, lambda self, x, gate: Llama.forward(self, x) * silu(gate)),
    "gated if asked": lambda: variant(Llama, lambda self, x, gate=None: Llama.forward(self, x)),
    "raises": lambda: variant(Llama, lambda self, x: Llama.forward(self, x @ self.missing)),
    "a weight for each head": lambda: nn.RMSNorm((3, 24)),
    "other parameters": lambda: nn.PReLU(),
    "with one dimension more": lambda: computing(lambda self, x: self.weight * self.rms(x)[None]),
    # right in float32, and in half precision neither of the two orders that a fused norm has
    "rounds at every step": lambda: variant(Weighted, lambda self, x: self.weight * self.rms(x)),
    "rounds its square": lambda: variant(
        Weighted, lambda self, x: (self.weight * x.float() * (x.square().mean(-1, True) + 1e-6).rsqrt()).to(x.dtype)
    ),
    "rounds its factor": lambda: variant(
        Unweighted, lambda self, x: x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype)
    ),
    "returns float32": lambda: variant(Llama, lambda self, x: Llama.forward(self, x).float()),
}


class TestNorm:
    @pytest.mark.parametrize("eps", [1e-3, 1e-5, 1e-6, 1e-8, 1e-12])
    @pytest.mark.parametrize(
        ("norm", "expected"),
        [
            (Llama, Norm(formula="rms", cast_before_weight=True)),
            (Olmo, Norm(formula="rms")),
            (Gemma, Norm(formula="rms", zero_centred=True)),
            (MuseSpark, Norm(formula="rms", zero_centred=True)),
            (GemmaRoundedFirst, Norm(formula="rms", zero_centred=True, cast_before_weight=True)),
            (nn.RMSNorm, Norm(formula="rms")),
            (Layer, Norm(formula="layer")),
            (nn.LayerNorm, Norm(formula="layer")),
        ],
    )
    @pytest.mark.parametrize("width", [24, 7])
    def test_known(self, norm: type[nn.Module], expected: Norm, eps: float, width: int) -> None:
        assert recognise_norm(norm(width, eps=eps)) == dataclasses.replace(expected, eps=eps)

    @pytest.mark.parametrize("eps", [1e-5, 1e-6])
    def test_without_a_weight(self, eps: float) -> None:
        assert recognise_norm(Unweighted(eps)) == Norm(formula="rms", eps=eps, weighted=False)

    def test_an_eps_that_is_no_attribute(self) -> None:
        """It is solved for."""
        norm = Llama(eps=3e-6)
        del norm.variance_epsilon
        norm.rms = lambda x: x * (x.square().mean(-1, keepdim=True) + 3e-6).rsqrt()  # type: ignore[method-assign]
        found = recognise_norm(norm)
        assert (found.formula, found.weighted, found.zero_centred) == ("rms", True, False)
        assert found.eps == pytest.approx(3e-6, rel=1e-3)

    def test_an_attribute_that_is_not_the_eps(self) -> None:
        norm = Llama(eps=1e-6)
        norm.__dict__ = {"eps": 1e-5, **vars(norm)}
        assert recognise_norm(norm).eps == 1e-6

    @pytest.mark.parametrize("name", NOT_KNOWN)
    def test_near_misses(self, name: str) -> None:
        assert recognise_norm(NOT_KNOWN[name]()) == Norm(formula="custom")


class Dropping(nn.Module):
    """An activation that draws random numbers, as one with dropout does in training mode."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(silu(x), training=True)


MODULES: dict[str, tuple[Callable[[nn.Module], Any], Callable[[], nn.Module], Any]] = {
    "gate": (recognise_gate, lambda: Experts(lambda g, u: silu(g) * u), Gate(formula="swiglu")),
    "activation": (recognise_gate, lambda: Ungated(nn.ReLU()), Gate(formula="relu")),
    "norm": (recognise_norm, Llama, Norm(formula="rms", eps=1e-6, cast_before_weight=True)),
    "zero-centred norm": (recognise_norm, Gemma, Norm(formula="rms", eps=1e-6, zero_centred=True)),
    "layer norm": (recognise_norm, lambda: nn.LayerNorm(24), Norm(formula="layer", eps=1e-5)),
}


@pytest.mark.parametrize("name", MODULES)
class TestSurroundings:
    """Recognising reads code, not weights, and leaves everything as it is."""

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
    def test_in_another_dtype(self, name: str, dtype: torch.dtype) -> None:
        recognise, make, expected = MODULES[name]
        assert recognise(make().to(dtype)) == expected

    def test_on_meta(self, name: str) -> None:
        recognise, make, expected = MODULES[name]
        with torch.device("meta"):
            module = make()
        assert recognise(module) == expected
        with torch.device("meta"):
            assert recognise(module) == expected

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_under_another_default_dtype(self, name: str, dtype: torch.dtype) -> None:
        """`from_pretrained` sets it while it builds a model."""
        recognise, make, expected = MODULES[name]
        torch.set_default_dtype(dtype)
        try:
            assert recognise(make()) == expected
        finally:
            torch.set_default_dtype(torch.float32)

    def test_under_autocast_and_inference_mode(self, name: str) -> None:
        recognise, make, expected = MODULES[name]
        with torch.autocast("cpu", torch.bfloat16):
            assert recognise(make()) == expected
        with torch.inference_mode():
            assert recognise(make()) == expected

    def test_whatever_the_weights_are(self, name: str) -> None:
        recognise, make, expected = MODULES[name]
        module = make()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(math.nan)
        assert recognise(module) == expected

    def test_the_module_is_left_alone(self, name: str) -> None:
        recognise, make, _ = MODULES[name]
        module = make().train()
        before = {key: value for key, value in vars(module).items() if key != "_parameters"}
        weights = {key: (value, value.clone(), value._version) for key, value in module.named_parameters()}
        random = torch.get_rng_state()
        recognise(module)
        assert torch.equal(torch.get_rng_state(), random)
        assert {key: value for key, value in vars(module).items() if key != "_parameters"} == before
        assert dict(module.named_parameters()).keys() == weights.keys()
        for key, parameter in module.named_parameters():
            same, value, version = weights[key]
            assert parameter is same and torch.equal(parameter, value)
            assert parameter._version == version and parameter.grad is None


def test_hooks_and_instance_forwards_of_a_norm_are_not_run() -> None:
    """accelerate's hooks move weights, and a forward that FSDP wraps communicates."""
    norm = Llama()

    def never(*_: Any) -> None:
        raise AssertionError("was run")

    norm.register_forward_pre_hook(never)
    norm.register_forward_hook(never)
    norm.forward = never  # type: ignore[method-assign]
    assert recognise_norm(norm).formula == "rms"


def test_a_view_in_the_place_of_a_weight_is_not_read() -> None:
    """FSDP puts one there for the time of a forward, and frees what is behind it."""
    norm = Llama()
    vars(norm)["weight"] = torch.full((24,), math.nan)
    assert recognise_norm(norm).formula == "rms"


def test_no_graph_is_built() -> None:
    seen: list[bool] = []

    def gate(g: Tensor, u: Tensor) -> Tensor:
        seen.append(torch.is_grad_enabled())
        return silu(g) * u

    recognise_gate(Experts(gate))
    norm = variant(Llama, lambda self, x: seen.append((self.weight * x).requires_grad) or Llama.forward(self, x))
    recognise_norm(norm)
    assert seen and not any(seen)
    assert torch.is_grad_enabled()


def test_random_numbers_are_not_used_up() -> None:
    """A seeded script gives the same numbers with a survey in it."""
    random = torch.get_rng_state()
    assert recognise_gate(Experts(lambda g, u: Dropping()(g) * u)) == CUSTOM
    assert recognise_gate(Ungated(Dropping())) == CUSTOM
    assert recognise_norm(variant(Llama, lambda self, x: F.dropout(Llama.forward(self, x)))).formula == "custom"
    assert torch.equal(torch.get_rng_state(), random)


def test_an_interrupt_is_not_swallowed() -> None:
    def interrupted(*_: Any) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recognise_gate(Experts(interrupted))
    with pytest.raises(KeyboardInterrupt):
        recognise_norm(variant(Llama, lambda self, x: interrupted()))
