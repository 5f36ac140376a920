"""The checks of linear backends."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_conformance import reference
from hf_moe_conformance.check import Layout, check
from hf_moe_conformance.checks.module_bench import BATCH, ModuleBench, ModuleLayout, declare


def _formula(x: Tensor, parameters: dict[str, Tensor]) -> Tensor:
    return reference.linear(x, parameters["weight"], parameters.get("bias"))


@cache
def linear_layouts() -> tuple[ModuleLayout, ...]:
    def layout(name: str, rows: int, columns: int, *features: str) -> ModuleLayout:
        build = partial(nn.Linear, columns, rows, bias="bias" in features)
        return ModuleLayout(name=name, build=build, formula=_formula, width=columns, features=frozenset(features))

    return (layout("plain", 96, 64), layout("wide", 64, 768), layout("bias", 96, 64, "bias"))


class LinearBench(ModuleBench):
    """One linear backend on one dtype and layout."""

    @classmethod
    def layouts(cls) -> Sequence[Layout]:
        return linear_layouts()


declare("linear", LinearBench, {"d_weight": ("plain", "wide", "bias"), "d_bias": ("bias",)})


@check("mode/autocast", kind="linear", bench=LinearBench, tier="training", needs={"autocast"}, dtypes=["float32"])
def autocast(bench: LinearBench) -> None:
    """Under bfloat16 autocast: y in bfloat16, in units of what eager loses under autocast."""

    def call(module: Any, x: Tensor) -> Tensor:
        with torch.autocast(bench.subject.device, torch.bfloat16):
            y: Tensor = module(x)
        return y

    bench.judge(bench.measures_of(BATCH, ["y", "dX"], backward=True, call=call, eager_call=call))
