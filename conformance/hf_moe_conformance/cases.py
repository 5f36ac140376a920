"""What experts backends are run on: layouts, sizes, routings, and unit-scale data for them.

Layouts are real decorated Transformers classes. Sizes are drawn anew from each run's seed, with a large case among
them: a backend that hands small inputs to stock code, or that is wrong beyond its first block, must meet its own code.
"""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_conformance import reference, zoo
from hf_moe_conformance.check import Layout
from hf_moe_conformance.reference import ExpertsFormula

WEIGHTS = {
    "gate_up_proj": "up",
    "up_proj": "up",
    "gate_up_proj_bias": "up_bias",
    "up_proj_bias": "up_bias",
    "down_proj": "down",
    "down_proj_bias": "down_bias",
    "post_expert_norm.weight": "norm",
}
"""The parameters of experts modules, and what the reference calls them."""

GRADIENTS = {"up": "dW_up", "up_bias": "db_up", "down": "dW_down", "down_bias": "db_down", "norm": "dW_norm"}


LIMIT = 1 + 2**-6
"""Of clamped gates. Low enough for unit-scale data to reach it in a third of all places, and on no grid of `exact`."""


@dataclass(frozen=True, kw_only=True)
class ExpertsLayout(Layout):
    """A layout as one family has it.

    Attributes:
        experts_class: the class, in the family's modelling file.
        formula: of a module of that class; it reads limits and the like from the module.
        weights: the reference's names of the weights that it has.
        float32_inside: its eager forward computes in float32 whatever the dtype, which no product in bfloat16 can be
            measured by. The unit is then the formula itself in the tested dtype.
    """

    family: str
    experts_class: str
    formula: Callable[[Any], ExpertsFormula] = field(repr=False)
    weights: tuple[str, ...] = ("up", "down")
    float32_inside: bool = False

    @property
    def kinked(self) -> bool:
        """Whether its gate clamps, so that gradients jump where a pre-activation crosses a limit."""
        return self.gate in ("gpt_oss", "swiglu_clamped")

    def build(self, *, experts: int, hidden: int, intermediate: int) -> nn.Module:
        """A stock module of these sizes on eager, with empty weights in float32 on the CPU."""
        config = zoo.config(self.family)
        sizes = {
            **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), experts),
            **dict.fromkeys(("hidden_size", "moe_hidden_size"), hidden),
            **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), intermediate),
            "swiglu_limit": LIMIT,
            **dict.fromkeys(("mlp_gate_softcap", "mlp_up_softcap"), 2.0),
        }
        for name, value in sizes.items():
            if hasattr(config, name):
                setattr(config, name, value)
        config._experts_implementation = "eager"
        return _modelling(self.family, self.experts_class)(config)  # type: ignore[no-any-return]


def _modelling(family: str, name: str) -> Any:
    folder = zoo.FAMILIES[family].folder
    return getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)


def _why_missing(family: str, experts_class: str, since: str) -> str | None:
    import transformers

    if zoo.available(family):
        cls = _modelling(family, experts_class)
        if getattr(cls.forward, "__closure__", None) is not None:
            return None
    return f"Transformers {transformers.__version__} does not dispatch {family}'s experts ({since} does)"


@cache
def experts_layouts() -> tuple[ExpertsLayout, ...]:
    """Every layout and gate that Transformers dispatches, by the family that has it."""

    def layout(
        name: str,
        family: str,
        experts_class: str,
        gate: str,
        formula: Callable[[Any], ExpertsFormula],
        *features: str,
        more: tuple[str, ...] = (),
        since: str = "5.17",
    ) -> ExpertsLayout:
        biases = ("up_bias", "down_bias") if "bias" in features else ()
        return ExpertsLayout(
            name=name,
            family=family,
            experts_class=experts_class,
            gate=gate,
            formula=formula,
            features=frozenset(features),
            weights=("up", "down", *biases, *more),
            missing=_why_missing(family, experts_class, since),
            float32_inside=family == "openai_privacy_filter",
        )

    def plain(activation: reference.Unary, **how: Any) -> Callable[[Any], ExpertsFormula]:
        return lambda module: ExpertsFormula(gate=reference.glu(activation), **how)

    def gpt_oss(**how: Any) -> Callable[[Any], ExpertsFormula]:
        def formula(module: Any) -> ExpertsFormula:
            alpha = getattr(module, "alpha", None) or module.swiglu_alpha
            return ExpertsFormula(gate=reference.gpt_oss_gate(module.limit, alpha), **how)

        return formula

    silu, gelu_tanh = plain(reference.silu), plain(reference.gelu_tanh)
    return (
        layout("default", "qwen3_moe", "Qwen3MoeExperts", "swiglu", silu),
        layout("gelu", "gemma4_text", "Gemma4TextExperts", "geglu_tanh", gelu_tanh),
        layout(
            "transposed",
            "aria_text",
            "AriaExperts",
            "swiglu",
            plain(reference.silu, transposed=True),
            "transposed",
            since="5.24",
        ),
        layout(
            "interleaved",
            "gpt_oss",
            "GptOssExperts",
            "gpt_oss",
            gpt_oss(transposed=True, interleaved=True),
            "transposed",
            "bias",
            "interleaved",
        ),
        layout(
            "bias",
            "openai_privacy_filter",
            "OpenAIPrivacyFilterExperts",
            "gpt_oss",
            gpt_oss(transposed=True),
            "transposed",
            "bias",
        ),
        layout(
            "ungated",
            "nemotron_h",
            "NemotronHExperts",
            "relu2",
            lambda module: ExpertsFormula(gate=reference.relu2, gated=False),
            "ungated",
        ),
        layout(
            "post_norm",
            "muse_spark_text",
            "MuseSparkExperts",
            "swiglu",
            lambda module: ExpertsFormula(
                gate=reference.glu(reference.silu),
                norm=reference.scaled_input_rms_norm(module.post_expert_norm.eps),
            ),
            "post_expert_norm",
            more=("norm",),
            since="5.20",
        ),
        layout(
            "clamped",
            "deepseek_v4",
            "DeepseekV4Experts",
            "swiglu_clamped",
            lambda module: ExpertsFormula(gate=reference.clamped_swiglu(module.limit)),
        ),
        layout("gpt_oss_gate", "minimax_m3_vl_text", "MiniMaxM3VLExperts", "gpt_oss", gpt_oss(), since="5.20"),
        layout(
            "custom_gate",
            "inkling2_text",
            "Inkling2Experts",
            "custom",
            lambda module: ExpertsFormula(
                gate=reference.softcapped_swiglu(module.act_fn.gate_softcap.softcap, module.act_fn.up_softcap.softcap)
            ),
            since="5.24",
        ),
        layout("fp32_gate", "beam", "BeamExperts", "swiglu", silu, since="5.24"),
    )


@torch.no_grad()
def fill(module: nn.Module, generator: torch.Generator) -> None:
    """Weights that keep unit-scale inputs at unit scale all the way."""
    transposed = bool(getattr(module, "is_transposed", False))
    for parameter in module.parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 3:
            fan_in = parameter.shape[1] if transposed else parameter.shape[2]
            values /= math.sqrt(fan_in)
        else:
            values *= 0.5
        parameter.copy_(values)


@torch.no_grad()
def exact(module: nn.Module) -> None:
    """Round the first projection to a grid so coarse that its product with `ExpertsInputs.exact` has no rounding error.

    For gates that clamp, in 16 bits. There one pre-activation in a hundred is within rounding of the limit, where the
    last bit decides whether a gradient is there or not: one such jump is ten times the rest of the error. Sums on the
    grid are multiples of 2^-5 below 8 (H up to 256), which bfloat16 has, and the limit lies between two of them.
    """
    for role, parameter in weights_of(module).items():
        if role == "up":
            hidden = parameter.shape[1] if getattr(module, "is_transposed", False) else parameter.shape[2]
            step = 2.0 ** -math.ceil(math.log2(hidden) / 2)
        elif role == "up_bias":
            step = 2.0**-3
        else:
            continue
        parameter.copy_((parameter / step).round() * step)


Routing = Callable[[int, int, int, torch.Generator], Tensor]
"""(T, E, K, generator) -> ids (T, K)."""


def uniform(tokens: int, experts: int, k: int, generator: torch.Generator) -> Tensor:
    return torch.rand(tokens, experts, generator=generator).topk(k).indices


def balanced(tokens: int, experts: int, k: int, generator: torch.Generator) -> Tensor:
    pairs = (torch.arange(tokens * k) % experts).view(tokens, k)
    return pairs[torch.randperm(tokens, generator=generator)]


def zipf(tokens: int, experts: int, k: int, generator: torch.Generator) -> Tensor:
    """Expert e of a random order is chosen in proportion to 1 / e^1.2, without repeats (Gumbel top-k)."""
    ranks = torch.randperm(experts, generator=generator).double() + 1
    gumbel = -torch.log(-torch.log(torch.rand(tokens, experts, generator=generator, dtype=torch.float64)))
    return (gumbel - 1.2 * ranks.log()).topk(k).indices


def one_expert(tokens: int, experts: int, k: int, generator: torch.Generator) -> Tensor:
    return torch.randint(experts, (1, 1), generator=generator).expand(tokens, k).clone()


def few_experts(tokens: int, experts: int, k: int, generator: torch.Generator) -> Tensor:
    """All tokens to k + 1 experts. The first and the last expert get none, where offsets go wrong."""
    chosen = torch.randperm(experts - 2, generator=generator)[: k + 1] + 1
    return chosen[uniform(tokens, k + 1, k, generator)]


def duplicates(tokens: int, experts: int, k: int, generator: torch.Generator) -> Tensor:
    """Every token names its first expert twice."""
    ids = uniform(tokens, experts, k, generator)
    ids[:, 1] = ids[:, 0]
    return ids


@dataclass(frozen=True, kw_only=True)
class ExpertsCase:
    """Sizes and a routing. `tokens` is a range that an odd number is drawn from.

    Sizes are rounded up to multiples of 16 and of the backend's alignment, unless they are to be `odd`. `autocast` says
    that products are in 16 bits whatever the dtype.
    """

    name: str
    routing: Routing
    tokens: tuple[int, int]
    top_k: int = 2
    experts: int = 8
    hidden: int = 64
    intermediate: int = 32
    odd: bool = False
    autocast: bool = False


SMALL, FEW, LARGE = (17, 95), (1, 3), (1025, 2047)
CASES = (
    ExpertsCase(name="uniform", routing=uniform, tokens=SMALL),
    ExpertsCase(name="balanced", routing=balanced, tokens=SMALL),
    ExpertsCase(name="zipf", routing=zipf, tokens=SMALL, top_k=3),
    ExpertsCase(name="one expert takes all", routing=one_expert, tokens=SMALL, top_k=1),
    ExpertsCase(name="few experts", routing=few_experts, tokens=SMALL),
    ExpertsCase(name="duplicates", routing=duplicates, tokens=SMALL, top_k=3),
    ExpertsCase(name="every expert", routing=uniform, tokens=SMALL, top_k=8),
    ExpertsCase(name="few tokens", routing=uniform, tokens=FEW),
    ExpertsCase(name="large", routing=zipf, tokens=LARGE, top_k=4, experts=16, hidden=128, intermediate=64),
)
ODD_SIZES = ExpertsCase(name="odd sizes", routing=uniform, tokens=SMALL, hidden=37, intermediate=19, odd=True)
AUTOCAST = ExpertsCase(name="autocast", routing=uniform, tokens=SMALL, autocast=True)
UNIFORM = CASES[0]
FEW_EXPERTS = CASES[4]


@dataclass(frozen=True, kw_only=True)
class ExpertsInputs:
    """Inputs in the tested dtype, on the CPU. Under `sentinels` some ids are E, with weight 0."""

    x: Tensor  # (T, H)
    ids: Tensor  # (T, K) int64
    shares: Tensor  # (T, K)
    cotangent: Tensor  # (T, H)

    def __post_init__(self) -> None:
        assert len(self.x) == len(self.ids) == len(self.shares) == len(self.cotangent)

    @property
    def exact(self) -> ExpertsInputs:
        """The same with tokens in halves, see `exact`."""
        return replace(self, x=(2 * self.x).round() / 2)


def draw_seed(seed: int, *what: object) -> torch.Generator:
    """A generator for one thing of a run: another thing or another run's seed gives another."""
    # Python's own hash of a string differs from process to process
    digest = hashlib.sha256(repr((seed, *what)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def draw_inputs(case: ExpertsCase, hidden: int, dtype: torch.dtype, generator: torch.Generator) -> ExpertsInputs:
    """Unit-scale tokens and cotangents, shares that sum to one."""
    low, high = case.tokens
    tokens = low + 2 * int(torch.randint((high - low) // 2 + 1, (1,), generator=generator))
    ids = case.routing(tokens, case.experts, case.top_k, generator)
    shares = torch.randn(tokens, case.top_k, generator=generator).softmax(-1)
    x = torch.randn(tokens, hidden, generator=generator)
    cotangent = torch.randn(tokens, hidden, generator=generator)
    return ExpertsInputs(x=x.to(dtype), ids=ids, shares=shares.to(dtype), cotangent=cotangent.to(dtype))


def weights_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """A module's weights under the reference's names."""
    return {WEIGHTS[name]: parameter for name, parameter in module.named_parameters()}
