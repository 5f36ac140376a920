"""The checks of norm backends."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from torch import Tensor, nn

from hf_moe_conformance import reference
from hf_moe_conformance.check import Layout
from hf_moe_conformance.checks.module_bench import ModuleBench, ModuleLayout, declare

WIDTH, EPS = 96, 1e-3
"""eps is larger than models have it, so that where it stands and whether it is there shows at unit scale."""


@cache
def norm_layouts() -> tuple[ModuleLayout, ...]:
    def family(folder: str, name: str, *arguments: Any) -> Callable[..., nn.Module]:
        def build(**more: Any) -> nn.Module:
            module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
            norm: nn.Module = getattr(module, name)(*arguments, eps=EPS, **more)
            return norm

        return build

    def layout(
        name: str,
        build: Callable[[], nn.Module],
        formula: Callable[[Tensor, dict[str, Tensor]], Tensor],
        *features: str,
    ) -> ModuleLayout:
        return ModuleLayout(name=name, build=build, formula=formula, width=WIDTH, features=frozenset(features))

    return (
        # half of the families round before the weight, the others once at the end: the same formula, other last bits
        layout(
            "rms",
            family("qwen3_moe", "Qwen3MoeRMSNorm", WIDTH),
            lambda x, p: reference.rms_norm(x, p["weight"], EPS),
        ),
        layout(
            "rms_rounded_once",
            family("gpt_oss", "GptOssRMSNorm", WIDTH),
            lambda x, p: reference.rms_norm(x, p["weight"], EPS),
        ),
        layout(
            "zero_centred",
            family("qwen3_next", "Qwen3NextRMSNorm", WIDTH),
            lambda x, p: reference.rms_norm(x, 1 + p["weight"], EPS),
            "zero_centred",
        ),
        layout(
            "unweighted",
            partial(family("gemma4", "Gemma4RMSNorm", WIDTH), with_scale=False),
            lambda x, p: reference.rms_norm(x, None, EPS),
            "unweighted",
        ),
        layout(
            "layer_norm",
            lambda: nn.LayerNorm(WIDTH, eps=EPS),
            lambda x, p: reference.layer_norm(x, p["weight"], p["bias"], EPS),
            "layer_norm",
        ),
    )


class NormBench(ModuleBench):
    """One norm backend on one dtype and layout."""

    @classmethod
    def layouts(cls) -> Sequence[Layout]:
        return norm_layouts()


declare(
    "norm",
    NormBench,
    {"d_weight": ("rms", "rms_rounded_once", "zero_centred", "layer_norm"), "d_bias": ("layer_norm",)},
)
