"""The reference is held equal to Transformers' own eager code in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hf_moe_conformance import reference, zoo
from hf_moe_conformance.cases import CASES, GRADIENTS, SMALL, draw_inputs, experts_layouts, fill, weights_of
from hf_moe_conformance.check import Variant
from hf_moe_conformance.checks import attention, norm
from hf_moe_conformance.checks.experts_bench import run_module, without_sentinels
from hf_moe_conformance.checks.module_bench import BATCH
from hf_moe_conformance.reference import ExpertsFormula
from hf_moe_conformance.subject import Subject
from torch import Tensor
from transformers.activations import ACT2FN

EXACT, FLOAT32_INSIDE = 1e-12, 1e-6
COMPUTES_IN_FLOAT32 = {"openai_privacy_filter", "inkling2_text", "inkling2_loop_text", "beam", "muse_spark_text"}


def distance(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).norm() / expected.norm().clamp_min(1e-300)).item()


def gate_of(family: str, experts: Any) -> Callable[..., Tensor]:
    """The gate of each family as its model code has it, by name; default is its activation times up."""
    if family in ("gpt_oss", "openai_privacy_filter", "minimax_m3_vl_text"):
        return reference.gpt_oss_gate(experts.limit, getattr(experts, "alpha", None) or experts.swiglu_alpha)
    if family in ("deepseek_v4", "glm5_next_text", "hy_v4", "hy_v4_vl_text"):
        return reference.clamped_swiglu(getattr(experts, "limit", None) or experts.swiglu_limit)
    if family in ("inkling2_text", "inkling2_loop_text"):
        act = experts.act_fn
        return reference.softcapped_swiglu(act.gate_softcap.softcap, act.up_softcap.softcap)
    known = {"silu": reference.silu, "gelu": reference.gelu, "gelu_pytorch_tanh": reference.gelu_tanh}
    known["relu2"] = reference.relu2
    x = torch.linspace(-3, 3, 7, dtype=torch.float64)
    name = next(n for n in known if torch.equal(ACT2FN[n](x), experts.act_fn(x)))
    return reference.glu(known[name]) if experts.has_gate else known[name]


def formula_of(family: str, experts: Any) -> ExpertsFormula:
    normed = getattr(experts, "has_post_expert_norm", False)
    return ExpertsFormula(
        gate=gate_of(family, experts),
        gated=experts.has_gate,
        transposed=experts.is_transposed,
        interleaved=experts.has_gate and not experts.is_concatenated,
        norm=reference.scaled_input_rms_norm(experts.post_expert_norm.eps) if normed else None,
    )


@pytest.mark.parametrize("family", zoo.families())
def test_experts_of_every_family(family: str) -> None:
    low_limit = {"swiglu_limit": 1.0} if hasattr(zoo.config(family), "swiglu_limit") else {}
    model = zoo.build(family, experts_implementation="eager", **low_limit)
    modules = zoo.experts_modules(model)
    if not modules:
        pytest.skip(f"Transformers {zoo.transformers.__version__} does not dispatch {family}'s experts")
    experts: Any = modules[0].double()
    fill(experts, torch.Generator().manual_seed(0))
    weights = weights_of(experts)
    hidden = weights["down"].shape[2 if experts.is_transposed else 1]
    case = replace(CASES[5], tokens=SMALL, experts=experts.num_experts)  # duplicates
    inputs = draw_inputs(case, hidden, torch.float64, torch.Generator().manual_seed(1))
    eager = run_module(experts, inputs, "cpu", backward=True)

    leaves = {role: w.detach().clone().requires_grad_() for role, w in weights.items()}
    x, shares = (t.clone().requires_grad_() for t in (inputs.x, inputs.shares))
    y = reference.experts(formula_of(family, experts), leaves, x, inputs.ids, shares)
    y.backward(inputs.cotangent)
    ours = {"y": y.detach(), "dX": x.grad, "d_router": shares.grad}
    ours |= {GRADIENTS[role]: leaf.grad for role, leaf in leaves.items()}

    limit = FLOAT32_INSIDE if family in COMPUTES_IN_FLOAT32 else EXACT
    assert eager.keys() == ours.keys()
    for name, expected in eager.items():
        assert expected is not None and ours[name] is not None
        assert distance(ours[name], expected) <= limit, name


def test_layouts_say_the_formula_that_their_module_has() -> None:
    """The same as above for the layouts of the cases, whose formulas are written apart."""
    for layout in experts_layouts():
        if layout.missing:
            continue
        experts: Any = layout.build(experts=8, hidden=32, intermediate=16).double()
        fill(experts, torch.Generator().manual_seed(0))
        inputs = draw_inputs(CASES[0], 32, torch.float64, torch.Generator().manual_seed(1))
        eager = run_module(experts, inputs, "cpu", backward=False)["y"]
        weights = {role: w.detach() for role, w in weights_of(experts).items()}
        ours = reference.experts(layout.formula(experts), weights, inputs.x, inputs.ids, inputs.shares)
        limit = FLOAT32_INSIDE if layout.family in COMPUTES_IN_FLOAT32 else EXACT
        assert eager is not None and distance(ours, eager) <= limit, layout.name
        assert set(weights) == set(layout.weights)


def test_pairs_of_other_ranks_take_part_in_nothing() -> None:
    """Against eager on the same function without them."""
    layout = experts_layouts()[0]
    experts: Any = layout.build(experts=8, hidden=32, intermediate=16).double()
    fill(experts, torch.Generator().manual_seed(0))
    weights = {role: w.detach() for role, w in weights_of(experts).items()}
    for foreign in (8, 11, -1):
        inputs = draw_inputs(CASES[0], 32, torch.float64, torch.Generator().manual_seed(1))
        inputs.ids[::2, 1] = foreign
        eager = run_module(experts, without_sentinels(inputs, 8), "cpu", backward=False)["y"]
        ours = reference.experts(layout.formula(experts), weights, inputs.x, inputs.ids, inputs.shares)
        assert eager is not None and distance(ours, eager) <= EXACT


SCENES = (
    attention.PLAIN,
    attention.LEFT,
    attention.RIGHT,
    attention.PACKED,
    attention.DECODE,
    attention.CHUNK,
)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
@pytest.mark.parametrize("layout", attention.attention_layouts(), ids=lambda layout: layout.name)
def test_attention_of_the_families(layout: attention.AttentionLayout, scene: attention.Scene) -> None:
    if "bidirectional" in layout.features and (scene.packed or scene.queries):
        return  # there are no such masks
    bench = attention.AttentionBench(Subject.find("attn", "eager"), Variant("float64", layout))
    inputs = bench.inputs(scene, 0)
    eager = attention.run_attention(layout, bench.stock, inputs, backward=True)
    ours = attention.run_reference(layout, bench.stock, inputs, backward=True)
    # the softmax of most families is in float32 whatever the dtype
    limit = EXACT if "sinks" in layout.features else FLOAT32_INSIDE
    # In float64 the mask's minimum overflows in that softmax, so that rows without any key are NaN and so is whatever
    # gradient they reach. No model runs in float64.
    blind = scene is attention.LEFT and "sinks" not in layout.features
    for name, expected in eager.items():
        got = ours[name]
        assert got is not None and expected is not None
        if blind and name != "y":
            continue
        if name == "y":
            got, expected = got[inputs.real], expected[inputs.real]
        assert distance(got, expected) <= limit, name


def test_attention_without_any_key_is_zero() -> None:
    query = torch.randn(1, 1, 2, 4, dtype=torch.float64)
    allowed = torch.tensor([[[False, False], [True, True]]])
    y = reference.attention(query, query, query, allowed, scale=0.5)
    assert y[0, 0].abs().max() == 0 and y[0, 1].abs().max() > 0


@pytest.mark.parametrize("layout", norm.norm_layouts(), ids=lambda layout: layout.name)
def test_norms(layout: Any) -> None:
    """Their own code computes in float32 inside."""
    bench = norm.NormBench(Subject.find("norm", "torch"), Variant("float64", layout))
    x = bench.inputs(BATCH, 0)
    eager = bench.run(bench.stock(0), x, backward=True)
    ours = bench.reference(bench.stock(0), x, backward=True)
    assert eager.keys() == ours.keys()
    for name, expected in eager.items():
        got = ours[name]
        assert got is not None and expected is not None
        assert distance(got, expected) <= FLOAT32_INSIDE, name


def test_cross_entropy() -> None:
    logits = torch.randn(9, 11, dtype=torch.float64)
    targets = torch.tensor([1, 2, -100, 4, 10, -100, 0, 3, 3])
    for items in (None, 7):
        expected = F.cross_entropy(logits, targets, reduction="mean" if items is None else "sum") / (items or 1)
        assert distance(reference.cross_entropy(logits, targets, items=items), expected) <= EXACT
    counted = F.cross_entropy(logits, targets.clamp(0), ignore_index=3)
    assert distance(reference.cross_entropy(logits, targets.clamp(0), ignore=3), counted) <= EXACT
