"""The whole-model tier: tiny models of every family in float32, on the backend against stock eager.

Whole models are compared in float32 only. In bfloat16 a last bit in one layer sends a token to another expert in the
next, and correct runs part by percents. Here the limit is fixed instead of measured in eager's own error: `UNITS` is
what counts as one, and three of it are allowed, as elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_backends import MoeBackendError, NoSite
from hf_moe_backends.spec import Kind
from hf_moe_conformance import zoo
from hf_moe_conformance.check import Bench, Layout, NotApplicable, Variant, check, require
from hf_moe_conformance.measures import ERROR, Measure
from hf_moe_conformance.subject import Subject

LOGITS, GRADIENTS = 1e-5, 1e-4
"""Limits of the relative error of the logits and of each parameter's gradient."""

ILL_CONDITIONED = {"hc_scale": 5e-4, "hc_base": 5e-4}
"""Gradients with limits of their own: these sum terms that cancel to a hundredth of what they are."""


@dataclass(frozen=True, kw_only=True)
class ModelLayout(Layout):
    """One family of the zoo, by its name there."""


@cache
def model_layouts() -> tuple[ModelLayout, ...]:
    import transformers

    return tuple(
        ModelLayout(
            name=name,
            missing=None if zoo.available(name) else f"Transformers {transformers.__version__} has no {name}",
        )
        for name in zoo.FAMILIES
    )


class ModelBench(Bench):
    """One backend on a whole model of one family."""

    def __init__(self, subject: Subject, variant: Variant):
        super().__init__(subject, variant)
        family = variant.layout.name
        # eager by name, so that not both sides run on what is the default
        how: dict[str, Any] = {f"{subject.kind}_implementation": "eager"} if subject.kind in ("attn", "experts") else {}
        # not the run's seed: on other draws single gradients are ill-conditioned, and eager itself is off by percents
        self.stock, self.model = (zoo.build(family, **how).to(subject.device) for _ in range(2))
        self.inputs = {name: t.to(subject.device) for name, t in zoo.sample_inputs(self.stock).items()}

    @classmethod
    def layouts(cls) -> Sequence[Layout]:
        return model_layouts()

    def candidate(self, needs: frozenset[str]) -> nn.Module:
        model: nn.Module = self.model.train("training" in needs)
        return model

    def apply(self) -> None:
        """Put the backend in place.

        Raises:
            NotApplicable: this family has nothing for this kind, or demands what the backend says no to. Its claims
                are tested layout by layout elsewhere.
        """
        try:
            self.subject.apply(self.model)
        except (NoSite, MoeBackendError) as refusal:
            raise NotApplicable(str(refusal)) from refusal


def _forward(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return zoo.output(model, inputs)


def _backward(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every parameter's gradient under a random cotangent."""
    model.zero_grad(set_to_none=True)
    y = zoo.output(model, inputs)
    generator = torch.Generator().manual_seed(2)
    torch.autograd.backward(y, torch.randn(y.shape, generator=generator).to(y))
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare(tensor: str, case: str, got: Tensor, expected: Tensor, limit: float) -> Measure:
    """The relative error, in units of a third of its limit."""
    difference, scale = (got.double() - expected.double()).norm().item(), expected.double().norm().item()
    relative = difference / scale if scale else (0.0 if difference == 0 else math.inf)
    unit = limit / ERROR
    return Measure(
        tensor=tensor,
        case=case,
        error=relative / unit,
        error_limit=ERROR,
        gain=0.0,
        gain_limit=0.0,
        worst_row=0.0,
        worst_row_limit=0.0,
        rms=relative,
        eager_rms=unit,
        elements=got.numel(),
    )


def worst(measures: Sequence[Measure]) -> Measure:
    """The one of the largest error, or of one that is NaN. The others are not kept: a model has hundreds."""
    return max(measures, key=lambda m: math.inf if math.isnan(m.error) else m.error)


def logits(bench: ModelBench) -> None:
    """The logits, or the last hidden state of a model without a head."""
    bench.apply()
    got, expected = _forward(bench.model, bench.inputs), _forward(bench.stock, bench.inputs)
    require(bool(torch.isfinite(expected).all()), "stock eager itself gives NaN or infinity")
    bench.judge([compare("logits", bench.variant.layout.name, got, expected, LOGITS)])


def gradients(bench: ModelBench) -> None:
    """The gradient of every parameter."""
    bench.apply()
    got, expected = _backward(bench.model, bench.inputs), _backward(bench.stock, bench.inputs)
    require(
        got.keys() == expected.keys(), f"other parameters have gradients: {sorted(got.keys() ^ expected.keys())[:5]}"
    )
    found = []
    for name, gradient in expected.items():
        limit = next((limit for end, limit in ILL_CONDITIONED.items() if name.endswith(end)), GRADIENTS)
        found.append(compare("gradient", name, got[name], gradient, limit))
    bench.judge([worst(found)])


_MODEL_KINDS: tuple[Kind, ...] = ("experts", "attn", "linear", "norm")

for _kind in _MODEL_KINDS:
    _declared = partial(check, kind=_kind, bench=ModelBench, dtypes=["float32"])
    _declared("model/logits")(logits)
    _declared("model/gradients", tier="training")(gradients)
