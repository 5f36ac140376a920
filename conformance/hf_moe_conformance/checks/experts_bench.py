"""The bench of experts backends: stock modules, the same with the backend in place, and what they return."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_conformance import reference
from hf_moe_conformance.cases import (
    GRADIENTS,
    UNIFORM,
    ExpertsCase,
    ExpertsInputs,
    ExpertsLayout,
    draw_inputs,
    draw_seed,
    exact,
    experts_layouts,
    fill,
    weights_of,
)
from hf_moe_conformance.check import Bench, Failure, Layout, Variant, require
from hf_moe_conformance.measures import Measure, measure
from hf_moe_conformance.subject import Subject

SEEDS = 3
"""Draws that each measure pools."""

Tensors = dict[str, "Tensor | None"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One draw of one case: `y` and gradients, as the backend, eager and the reference have them."""

    inputs: ExpertsInputs
    got: Tensors
    eager: Tensors
    expected: Tensors


class ExpertsBench(Bench):
    """One experts backend on one dtype and layout."""

    layout: ExpertsLayout

    def __init__(self, subject: Subject, variant: Variant):
        super().__init__(subject, variant)
        assert isinstance(variant.layout, ExpertsLayout)
        self.layout = variant.layout
        self.dtype = variant.torch_dtype
        self._stock: dict[tuple[object, ...], nn.Module] = {}
        self._backed: dict[tuple[object, ...], nn.Module] = {}
        self._outcomes: dict[str, tuple[bool, list[Outcome]]] = {}

    @classmethod
    def layouts(cls) -> Sequence[Layout]:
        return experts_layouts()

    @property
    def names(self) -> tuple[str, ...]:
        """The gradients that this layout has."""
        return ("dX", "d_router", *(GRADIENTS[role] for role in self.layout.weights))

    def candidate(self, needs: frozenset[str]) -> nn.Module:
        module = copy.deepcopy(self.stock(UNIFORM, 0)).train("training" in needs)
        if "sentinels" in needs:
            module._is_expert_parallel = True  # type: ignore[assignment]
        if "parametrized" in needs:
            parametrize(module, self.generator("lora"))
        return module

    def generator(self, *what: object) -> torch.Generator:
        return draw_seed(self.subject.seed, str(self.variant), *what)

    def stock(self, case: ExpertsCase, seed: int, dtype: torch.dtype | None = None) -> nn.Module:
        """The stock module on eager, in the tested dtype, with weights of this draw. Do not change it."""
        hidden, intermediate = self._sizes(case)
        dtype = dtype or self.dtype
        on_grid = self._exact(case, dtype)
        key = (case.experts, hidden, intermediate, seed, dtype, on_grid)
        if key not in self._stock:
            module = self.layout.build(experts=case.experts, hidden=hidden, intermediate=intermediate)
            fill(module, draw_seed(self.subject.seed, self.layout.name, "weights", *key[:4]))
            if on_grid:
                exact(module)
            self._stock[key] = module.to(dtype).to(self.subject.device).eval()
        return self._stock[key]

    def backed(self, case: ExpertsCase, seed: int, *needs: str, dtype: torch.dtype | None = None) -> nn.Module:
        """A copy of the stock module with the backend in place.

        Raises:
            Failure: it was refused, which the backend's claims say that it is not.
        """
        stock = self.stock(case, seed, dtype)
        key = (id(stock), *needs)
        if key not in self._backed:
            module = copy.deepcopy(stock).train("training" in needs)
            if "sentinels" in needs:
                module._is_expert_parallel = True  # type: ignore[assignment]
            self.put_in_place(module)
            self._backed[key] = module
        return self._backed[key]

    def _sizes(self, case: ExpertsCase) -> tuple[int, int]:
        """Hidden and intermediate size, rounded up to what the backend needs."""
        if case.odd:
            return case.hidden, case.intermediate
        step = math.lcm(16, self.subject.spec.capabilities.alignment)
        return -(-case.hidden // step) * step, -(-case.intermediate // step) * step

    def inputs(self, case: ExpertsCase, seed: int, dtype: torch.dtype | None = None) -> ExpertsInputs:
        dtype = dtype or self.dtype
        drawn = draw_inputs(case, self._sizes(case)[0], dtype, self.generator(case.name, seed))
        return drawn.exact if self._exact(case, dtype) else drawn

    def _exact(self, case: ExpertsCase, dtype: torch.dtype) -> bool:
        """Whether the first projection is to have no rounding error, see `cases.exact`."""
        return self.layout.kinked and (case.autocast or dtype.itemsize < 4)

    def outcomes(self, case: ExpertsCase, *, backward: bool) -> list[Outcome]:
        """`SEEDS` draws of a case, computed once a bench."""
        known = self._outcomes.get(case.name)
        if known is None or (backward and not known[0]):
            needs = ("training",) if backward else ()
            found = []
            for seed in range(SEEDS):
                module, inputs = self.backed(case, seed, *needs), self.inputs(case, seed)
                found.append(self.outcome(case, seed, inputs, module, backward=backward))
            self._outcomes[case.name] = known = (backward, found)
        return known[1]

    def outcome(
        self,
        case: ExpertsCase,
        seed: int,
        inputs: ExpertsInputs,
        module: nn.Module,
        *,
        backward: bool,
        call: Callable[..., Tensor] | None = None,
        like_eager: ExpertsInputs | None = None,
    ) -> Outcome:
        """Run one draw three times.

        Args:
            call: in the place of calling the module: `call(module, x, ids, shares)`.
            like_eager: the same values as `inputs` in a form that stock eager takes.
        """
        stock = self.stock(case, seed)
        if backward:
            inputs = off_kinks(self.layout, stock, inputs)
        plain = without_sentinels(like_eager or inputs, case.experts)
        if self.layout.float32_inside:
            eager = run_formula(self.layout, stock, plain, self.dtype, backward=backward)
        else:
            eager = run_module(stock, plain, self.subject.device, backward=backward)
        return Outcome(
            inputs=inputs,
            got=run_module(module, inputs, self.subject.device, backward=backward, call=call),
            eager=eager,
            expected=run_reference(self.layout, stock, like_eager or inputs, backward=backward),
        )

    def compare(
        self, tensor: str, case: str, outcomes: Sequence[Outcome], precision: torch.dtype | None = None
    ) -> Measure:
        """One tensor over several draws; `precision` as `measure` has it.

        Raises:
            Failure: the backend returned none, or one of another shape, dtype or device.
        """
        got, eager, expected = [], [], []
        for outcome in outcomes:
            ours, theirs, wanted = outcome.got[tensor], outcome.eager[tensor], outcome.expected[tensor]
            assert wanted is not None and theirs is not None
            if ours is None:
                raise Failure([f"{tensor} ({case}): there is no gradient"])
            require(
                ours.shape == wanted.shape,
                f"{tensor} ({case}) has shape {tuple(ours.shape)}, expected {tuple(wanted.shape)}",
            )
            require(ours.dtype == theirs.dtype, f"{tensor} ({case}) is {ours.dtype}, that of eager is {theirs.dtype}")
            got.append(ours)
            eager.append(theirs)
            expected.append(wanted)
        return measure(tensor, case, got, eager, expected, precision=precision)


def run_module(
    module: Any,
    inputs: ExpertsInputs,
    device: str,
    *,
    backward: bool,
    call: Callable[..., Tensor] | None = None,
) -> Tensors:
    """`y`, and with `backward` the gradients of everything under the inputs' cotangent. None where there is none."""
    x, shares = keep_strides(inputs.x, device), keep_strides(inputs.shares, device)
    ids = keep_strides(inputs.ids, device)
    if not backward:
        with torch.no_grad():
            y = call(module, x, ids, shares) if call else module(x, ids, shares)
        return {"y": y}
    module.zero_grad(set_to_none=True)
    x.requires_grad_()
    shares.requires_grad_()
    y = call(module, x, ids, shares) if call else module(x, ids, shares)
    y.backward(inputs.cotangent.to(device, y.dtype))
    found: Tensors = {"y": y.detach(), "dX": x.grad, "d_router": shares.grad}
    for role, parameter in weights_of(module).items():
        found[GRADIENTS[role]] = parameter.grad
    module.zero_grad(set_to_none=True)
    return found


def keep_strides(tensor: Tensor, device: str) -> Tensor:
    """A leaf with these values and strides on the device; `to` makes a copy contiguous."""
    if tensor.is_contiguous():
        return tensor.detach().clone().to(device)
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return made.copy_(tensor.detach())


def run_reference(layout: ExpertsLayout, stock: nn.Module, inputs: ExpertsInputs, *, backward: bool) -> Tensors:
    """The same from the float64 reference, on the same rounded weights and inputs."""
    return run_formula(layout, stock, inputs, torch.float64, backward=backward)


def run_formula(
    layout: ExpertsLayout, stock: nn.Module, inputs: ExpertsInputs, dtype: torch.dtype, *, backward: bool
) -> Tensors:
    """The reference's formula, computed in `dtype` on the CPU."""

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().cpu().to(dtype).requires_grad_(backward)

    weights = {role: leaf(weight) for role, weight in weights_of(stock).items()}
    x, shares = leaf(inputs.x), leaf(inputs.shares)
    with torch.set_grad_enabled(backward):
        y = reference.experts(layout.formula(stock), weights, x, inputs.ids.long(), shares)
    found: Tensors = {"y": y.detach()}
    if backward:
        torch.autograd.backward(y, inputs.cotangent.to(dtype))
        found |= {"dX": x.grad, "d_router": shares.grad}
        found |= {GRADIENTS[role]: weight.grad for role, weight in weights.items()}
    return found


def off_kinks(layout: ExpertsLayout, stock: nn.Module, inputs: ExpertsInputs) -> ExpertsInputs:
    """The same without the cotangents of tokens whose gradient jumps within rounding of where they are.

    Which side of a clamp's limit such a token falls on, the last bit decides. Eager has such a jump in some draws, and
    a backend that rounds otherwise has another. In float32 few tokens are so close; in 16 bits see `cases.exact`.
    """
    if not layout.kinked or inputs.x.dtype != torch.float32 or not len(inputs.x):
        return inputs
    if not inputs.cotangent.is_contiguous():
        return inputs  # its strides are what is tested
    moved = [
        run_reference(layout, stock, replace(inputs, x=inputs.x.double() * (1 + step)), backward=True)["dX"]
        for step in (-1e-5, 1e-5)
    ]
    assert moved[0] is not None and moved[1] is not None
    # where nothing jumps, a step of 1e-5 moves the gradient by about as much
    jump = (moved[0] - moved[1]).norm(dim=-1) > 1e-3 * moved[0].norm(dim=-1)
    return replace(inputs, cotangent=inputs.cotangent.masked_fill(jump[:, None], 0))


def without_sentinels(inputs: ExpertsInputs, experts: int) -> ExpertsInputs:
    """The same function of everything but the router's weights, for eager, which fails on sentinels in
    some families."""
    foreign = (inputs.ids < 0) | (inputs.ids >= experts)
    if not foreign.any():
        return inputs
    return replace(
        inputs,
        ids=torch.where(foreign, 0, inputs.ids),
        shares=inputs.shares.masked_fill(foreign, 0),
    )


class LowRank(nn.Module):
    """weight + left right: LoRA as a torch parametrization, as peft puts it on experts (`target_parameters`)."""

    left: Tensor  # (E, rows, rank)
    right: Tensor  # (E, rank, columns)

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator):
        super().__init__()
        experts, rows, columns = weight.shape
        for name, shape in (("left", (experts, rows, rank)), ("right", (experts, rank, columns))):
            setattr(self, name, nn.Parameter((torch.randn(shape, generator=generator) * 0.2).to(weight)))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.left @ self.right


def parametrize(module: nn.Module, generator: torch.Generator) -> None:
    """LoRA on both projections; the weights themselves are frozen."""
    from torch.nn.utils.parametrize import register_parametrization

    for name, weight in list(module.named_parameters()):
        if weight.ndim == 3:
            weight.requires_grad_(False)
            register_parametrization(module, name, LowRank(weight, 4, generator), unsafe=True)
