"""The checks of experts backends."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_moe_backends import reset_moe_backend
from hf_moe_conformance import reference
from hf_moe_conformance.cases import (
    AUTOCAST,
    CASES,
    FEW_EXPERTS,
    GRADIENTS,
    ODD_SIZES,
    UNIFORM,
    ExpertsInputs,
    weights_of,
)
from hf_moe_conformance.check import NotApplicable, check, require
from hf_moe_conformance.checks.experts_bench import (
    SEEDS,
    ExpertsBench,
    LowRank,
    Outcome,
    parametrize,
    run_module,
    run_reference,
)
from hf_moe_conformance.measures import measure

experts_check = partial(check, kind="experts", bench=ExpertsBench)
training_check = partial(experts_check, tier="training")

TYPICAL = ("default", "interleaved", "ungated")
"""Layouts for checks of how a backend is called, where a layout more says nothing more."""


def changed(
    bench: ExpertsBench, change: Callable[[ExpertsInputs], ExpertsInputs], *needs: str, backward: bool, **how: Any
) -> list[Outcome]:
    """Draws of the uniform case with their inputs changed."""
    return [
        bench.outcome(
            UNIFORM,
            seed,
            change(bench.inputs(UNIFORM, seed)),
            bench.backed(UNIFORM, seed, *needs),
            backward=backward,
            **how,
        )
        for seed in range(SEEDS)
    ]


@experts_check("forward")
def forward(bench: ExpertsBench) -> None:
    """The output on every routing and size."""
    bench.judge(bench.compare("y", case.name, bench.outcomes(case, backward=False)) for case in CASES)


def _gradient(tensor: str, bench: ExpertsBench) -> None:
    bench.judge(bench.compare(tensor, case.name, bench.outcomes(case, backward=True)) for case in CASES)


for _tensor in ("dX", "d_router", "dW_up", "dW_down"):
    training_check(f"grad/{_tensor}")(partial(_gradient, _tensor))
for _tensor in ("db_up", "db_down"):
    training_check(f"grad/{_tensor}", layouts=("interleaved", "bias"))(partial(_gradient, _tensor))
training_check("grad/dW_norm", layouts=("post_norm",))(partial(_gradient, "dW_norm"))


@training_check("grad/unrouted")
def unrouted(bench: ExpertsBench) -> None:
    """Experts without tokens have a gradient of exactly zero, or there is none."""
    for outcome in bench.outcomes(FEW_EXPERTS, backward=True):
        idle = sorted(set(range(FEW_EXPERTS.experts)) - set(outcome.inputs.ids.flatten().tolist()))
        for role in bench.layout.weights:
            gradient = outcome.got[GRADIENTS[role]]
            if role != "norm" and gradient is not None:
                largest = gradient[idle].abs().max().item()
                require(largest == 0, f"{GRADIENTS[role]} of experts without tokens is up to {largest:.3g}, not zero")


@training_check("grad/frozen", layouts=TYPICAL)
def frozen(bench: ExpertsBench) -> None:
    """Frozen experts, as under LoRA on attention: dX is right, and no weight has a gradient."""
    found = []
    for seed in range(SEEDS):
        module = copy.deepcopy(bench.stock(UNIFORM, seed)).train()
        module.requires_grad_(False)
        bench.put_in_place(module)
        found.append(bench.outcome(UNIFORM, seed, bench.inputs(UNIFORM, seed), module, backward=True))
    given = [name for name in GRADIENTS.values() if any(outcome.got.get(name) is not None for outcome in found)]
    require(not given, f"frozen weights have gradients: {', '.join(given)}")
    bench.judge(bench.compare(name, "frozen weights", found) for name in ("dX", "d_router"))


@training_check("grad/input_frozen", layouts=TYPICAL)
def input_frozen(bench: ExpertsBench) -> None:
    """Inputs and router that need no gradient, as in a first layer: the weights' gradients are right."""

    def detached(module: nn.Module, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        y: Tensor = module(x.detach(), ids, shares.detach())
        return y

    found = changed(bench, lambda inputs: inputs, "training", backward=True, call=detached)
    bench.judge(bench.compare(GRADIENTS[role], "frozen inputs", found) for role in bench.layout.weights)


# Edges: inputs at the rim of the contract.


@experts_check("edge/no_tokens")
def no_tokens(bench: ExpertsBench) -> None:
    """No tokens give no rows, of the right width and dtype."""
    inputs = first(bench.inputs(UNIFORM, 0), 0)
    y = run_module(bench.backed(UNIFORM, 0), inputs, bench.subject.device, backward=False)["y"]
    assert y is not None
    require(y.shape == inputs.x.shape, f"no tokens give {tuple(y.shape)}, expected {tuple(inputs.x.shape)}")
    require(y.dtype == inputs.x.dtype, f"no tokens give {y.dtype}, expected {inputs.x.dtype}")


@training_check("edge/no_tokens_backward")
def no_tokens_backward(bench: ExpertsBench) -> None:
    """No tokens: the output stays connected to autograd, and every gradient is zero or none."""
    inputs = first(bench.inputs(UNIFORM, 0), 0)
    got = run_module(bench.backed(UNIFORM, 0, "training"), inputs, bench.subject.device, backward=True)
    dx = got["dX"]
    require(dx is not None and dx.shape == inputs.x.shape, "no tokens give no dX: ranks without tokens would hang")
    all_zero(got, [GRADIENTS[role] for role in bench.layout.weights], "no tokens")


def first(inputs: ExpertsInputs, tokens: int) -> ExpertsInputs:
    return ExpertsInputs(
        x=inputs.x[:tokens], ids=inputs.ids[:tokens], shares=inputs.shares[:tokens], cotangent=inputs.cotangent[:tokens]
    )


def all_zero(got: dict[str, Tensor | None], names: Iterable[str], when: str) -> None:
    for name in names:
        gradient = got[name]
        require(gradient is None or not gradient.any(), f"{name} is not zero with {when}")


@experts_check("edge/int32_ids", layouts=TYPICAL)
def int32_ids(bench: ExpertsBench) -> None:
    """Ids of 32 bits, as many routers' kernels give them."""
    found = []
    for seed in range(SEEDS):
        inputs = bench.inputs(UNIFORM, seed)
        narrow = replace(inputs, ids=inputs.ids.int())
        module = bench.backed(UNIFORM, seed)
        found.append(bench.outcome(UNIFORM, seed, narrow, module, backward=False, like_eager=inputs))
    bench.judge([bench.compare("y", "int32 ids", found)])


@experts_check("edge/strided")
def strided(bench: ExpertsBench) -> None:
    """Inputs that are views with other strides."""

    def views(inputs: ExpertsInputs) -> ExpertsInputs:
        return replace(
            inputs,
            x=torch.cat([inputs.x, inputs.x], dim=1)[:, : inputs.x.shape[1]],
            ids=inputs.ids.t().contiguous().t(),
            shares=inputs.shares.t().contiguous().t(),
        )

    bench.judge([bench.compare("y", "strided", changed(bench, views, backward=False))])


@training_check("edge/strided_backward")
def strided_backward(bench: ExpertsBench) -> None:
    """A cotangent that is one number expanded, as `y.sum().backward()` gives it."""

    def ones(inputs: ExpertsInputs) -> ExpertsInputs:
        return replace(inputs, cotangent=inputs.cotangent.new_ones(()).expand(inputs.cotangent.shape))

    found = changed(bench, ones, "training", backward=True)
    bench.judge(bench.compare(name, "expanded cotangent", found) for name in bench.names)


@experts_check("edge/router_dtype")
def router_dtype(bench: ExpertsBench) -> None:
    """Router weights of another dtype than the tokens'; half of the families give float32 under bfloat16."""
    other = torch.bfloat16 if bench.dtype == torch.float32 else torch.float32

    def cast(inputs: ExpertsInputs) -> ExpertsInputs:
        generator = bench.generator("shares", len(inputs.x))
        return replace(inputs, shares=torch.rand(inputs.shares.shape, generator=generator).to(other))

    bench.judge([bench.compare("y", f"{other} shares", changed(bench, cast, backward=False))])


@experts_check("edge/nan_row", layouts=TYPICAL)
def nan_row(bench: ExpertsBench) -> None:
    """A NaN in one token stays in its row."""
    inputs = bench.inputs(UNIFORM, 0)
    x = inputs.x.clone()
    x[3, 5] = torch.nan
    y = run_module(bench.backed(UNIFORM, 0), replace(inputs, x=x), bench.subject.device, backward=False)["y"]
    assert y is not None
    rows = y.isnan().any(-1).nonzero().flatten().tolist()
    require(rows == [3], f"a NaN in row 3 of the input gives NaN in rows {rows[:10]}")


@experts_check("edge/large_values")
def large_values(bench: ExpertsBench) -> None:
    """Tokens a hundred times unit scale."""
    found = changed(bench, lambda inputs: replace(inputs, x=inputs.x * 100), backward=False)
    bench.judge([bench.compare("y", "x100", found)])


@experts_check("edge/inputs_kept")
def inputs_kept(bench: ExpertsBench) -> None:
    """The inputs and weights are as they were: the caller goes on using them."""
    module, inputs = bench.backed(UNIFORM, 0), bench.inputs(UNIFORM, 0)
    kept: dict[str, Tensor] = {"x": inputs.x, "ids": inputs.ids, "shares": inputs.shares, **weights_of(module)}
    kept = {name: t.detach().to(bench.subject.device) for name, t in kept.items()}
    before = {name: t.clone() for name, t in kept.items()}
    with torch.no_grad():
        module(kept["x"], kept["ids"], kept["shares"])
    written = [name for name, t in kept.items() if not torch.equal(t, before[name])]
    require(not written, f"the call writes into {', '.join(written)}")


def odd_outcomes(bench: ExpertsBench, *needs: str, backward: bool) -> list[Outcome]:
    """Draws at sizes that are a multiple of nothing.

    Raises:
        NotApplicable: the backend declares that it needs aligned sizes, and refuses these.
    """
    if bench.subject.spec.capabilities.alignment > 1:
        refusal = bench.refused(copy.deepcopy(bench.stock(ODD_SIZES, 0)))
        sizes = f"{ODD_SIZES.hidden} and {ODD_SIZES.intermediate}"
        require(refusal is not None, f"it declares that it needs aligned sizes, and took {sizes}")
        raise NotApplicable(refusal)
    return [
        bench.outcome(
            ODD_SIZES, seed, bench.inputs(ODD_SIZES, seed), bench.backed(ODD_SIZES, seed, *needs), backward=backward
        )
        for seed in range(SEEDS)
    ]


@experts_check("edge/odd_sizes")
def odd_sizes(bench: ExpertsBench) -> None:
    """Hidden and intermediate sizes that are a multiple of nothing: 37 and 19."""
    bench.judge([bench.compare("y", "odd sizes", odd_outcomes(bench, backward=False))])


@training_check("edge/odd_sizes_backward")
def odd_sizes_backward(bench: ExpertsBench) -> None:
    """The gradients at these sizes."""
    found = odd_outcomes(bench, "training", backward=True)
    bench.judge(bench.compare(name, "odd sizes", found) for name in bench.names)


# Sentinels: pairs of other ranks under expert parallelism, id E and weight 0.


def with_sentinels(inputs: ExpertsInputs, experts: int, foreign_id: int, seed: int) -> ExpertsInputs:
    """A third of the pairs, one token's pairs among them, belong to other ranks."""
    foreign = torch.rand(inputs.ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.33
    foreign[0] = True
    return replace(
        inputs, ids=inputs.ids.masked_fill(foreign, foreign_id), shares=inputs.shares.masked_fill(foreign, 0)
    )


def sentinel_outcomes(bench: ExpertsBench, *needs: str, foreign_id: int, backward: bool) -> list[Outcome]:
    return [
        bench.outcome(
            UNIFORM,
            seed,
            with_sentinels(bench.inputs(UNIFORM, seed), UNIFORM.experts, foreign_id, seed),
            bench.backed(UNIFORM, seed, "sentinels", *needs),
            backward=backward,
        )
        for seed in range(SEEDS)
    ]


@experts_check("sentinels/forward", needs={"sentinels"})
def sentinels_forward(bench: ExpertsBench) -> None:
    """Pairs of other ranks add nothing."""
    found = sentinel_outcomes(bench, foreign_id=UNIFORM.experts, backward=False)
    bench.judge([bench.compare("y", "sentinels", found)])


@experts_check("sentinels/negative", needs={"sentinels", "negative_ids"})
def negative_ids(bench: ExpertsBench) -> None:
    """The same where a dispatcher marks them with -1."""
    bench.judge([bench.compare("y", "ids of -1", sentinel_outcomes(bench, foreign_id=-1, backward=False))])


@training_check("sentinels/grad", needs={"sentinels"})
def sentinels_gradients(bench: ExpertsBench) -> None:
    """Pairs of other ranks add nothing to the gradients of tokens and weights."""
    found = sentinel_outcomes(bench, "training", foreign_id=UNIFORM.experts, backward=True)
    bench.judge(bench.compare(name, "sentinels", found) for name in bench.names if name != "d_router")


@training_check("sentinels/d_router", needs={"sentinels"})
def sentinels_router(bench: ExpertsBench) -> None:
    """The router's gradient is exactly zero for pairs of other ranks and right for the others."""
    found = sentinel_outcomes(bench, "training", foreign_id=UNIFORM.experts, backward=True)
    for outcome in found:
        gradient = outcome.got["d_router"]
        require(gradient is not None, "d_router (sentinels): there is no gradient")
        eager = outcome.eager["d_router"]
        assert gradient is not None and eager is not None
        foreign = outcome.inputs.ids == UNIFORM.experts
        largest = gradient.cpu()[foreign].abs().max().item()
        require(largest == 0, f"d_router is up to {largest:.3g} for pairs of other ranks, not zero")
        eager.masked_fill_(foreign.to(eager.device), 0)  # eager ran without sentinels
    bench.judge([bench.compare("d_router", "sentinels", found)])


@training_check("sentinels/all", needs={"sentinels"}, layouts=TYPICAL)
def sentinels_only(bench: ExpertsBench) -> None:
    """A rank whose experts nobody chose: zeros, connected to autograd."""
    inputs = bench.inputs(UNIFORM, 0)
    inputs = replace(inputs, ids=torch.full_like(inputs.ids, UNIFORM.experts), shares=torch.zeros_like(inputs.shares))
    got = run_module(bench.backed(UNIFORM, 0, "sentinels", "training"), inputs, bench.subject.device, backward=True)
    require(got["dX"] is not None, "with sentinels only there is no dX: ranks without pairs would hang")
    all_zero(got, ["y", *bench.names], "sentinels only")


# Modes: how the module is run.


@experts_check("mode/inference", layouts=TYPICAL)
def inference_mode(bench: ExpertsBench) -> None:
    """Under `inference_mode`, with parameters that require gradients."""

    def call(module: nn.Module, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        with torch.inference_mode():
            y: Tensor = module(x, ids, shares)
        return y

    bench.judge([bench.compare("y", "inference_mode", changed(bench, lambda i: i, backward=False, call=call))])


@experts_check("mode/grad_off", layouts=TYPICAL)
def grad_off(bench: ExpertsBench) -> None:
    """Under `no_grad` there is no graph, and with gradients there is, in eval mode as well."""
    module, inputs = bench.backed(UNIFORM, 0), bench.inputs(UNIFORM, 0)
    device = bench.subject.device
    arguments = inputs.x.to(device), inputs.ids.to(device), inputs.shares.to(device)
    with torch.no_grad():
        require(not module(*arguments).requires_grad, "under no_grad the output requires a gradient")
    if bench.subject.spec.capabilities.training:
        require(module(*arguments).requires_grad, "with gradients on, the output is cut off from the weights")


@experts_check("mode/repeat", needs={"deterministic"})
def repeat(bench: ExpertsBench) -> None:
    """The same call gives the same bits."""
    module, inputs = bench.backed(CASES[-1], 0), bench.inputs(CASES[-1], 0)
    runs = [run_module(module, inputs, bench.subject.device, backward=False) for _ in range(4)]
    same_bits(runs, ["y"])


@training_check("mode/repeat_backward", needs={"deterministic"})
def repeat_backward(bench: ExpertsBench) -> None:
    """The same call gives the same gradients, bit for bit."""
    module, inputs = bench.backed(CASES[-1], 0, "training"), bench.inputs(CASES[-1], 0)
    same_bits([run_module(module, inputs, bench.subject.device, backward=True) for _ in range(4)], bench.names)


def same_bits(runs: list[dict[str, Tensor | None]], names: Iterable[str]) -> None:
    for name in names:
        values = [run[name] for run in runs]
        equal = all(v is not None and values[0] is not None and torch.equal(v, values[0]) for v in values)
        require(equal, f"{name} differs between {len(runs)} calls on the same inputs")


@training_check("mode/autocast", needs={"autocast"}, dtypes=["float32"])
def autocast(bench: ExpertsBench) -> None:
    """Under bfloat16 autocast on float32 weights, in units of what eager loses under autocast."""
    device = bench.subject.device

    def call(module: nn.Module, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            y: Tensor = module(x, ids, shares)
        return y

    found = []
    for seed in range(SEEDS):
        inputs, stock = bench.inputs(AUTOCAST, seed), bench.stock(AUTOCAST, seed)
        found.append(
            Outcome(
                inputs=inputs,
                got=run_module(bench.backed(AUTOCAST, seed, "training"), inputs, device, backward=True, call=call),
                eager=run_module(stock, inputs, device, backward=True, call=call),
                expected=run_reference(bench.layout, stock, inputs, backward=True),
            )
        )
    bench.judge(bench.compare(name, "autocast", found, torch.bfloat16) for name in ("y", *bench.names))


@training_check("mode/checkpoint", layouts=TYPICAL)
def checkpointing(bench: ExpertsBench) -> None:
    """Recomputed in backward."""

    def call(module: nn.Module, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        y: Tensor = checkpoint(module, x, ids, shares, use_reentrant=False)
        return y

    found = changed(bench, lambda inputs: inputs, "training", backward=True, call=call)
    bench.judge(bench.compare(name, "checkpointing", found) for name in ("y", *bench.names))


@training_check("mode/accumulate", layouts=TYPICAL)
def accumulate(bench: ExpertsBench) -> None:
    """The gradients of two batches add up: twice the same batch is twice the gradient."""
    module, inputs = bench.backed(UNIFORM, 0, "training"), bench.inputs(UNIFORM, 0)
    device = bench.subject.device
    once = run_module(module, inputs, device, backward=True)
    for _ in range(2):
        module(inputs.x.to(device), inputs.ids.to(device), inputs.shares.to(device)).backward(
            inputs.cotangent.to(device)
        )
    for role, parameter in weights_of(module).items():
        gradient, single = parameter.grad, once[GRADIENTS[role]]
        assert gradient is not None and single is not None
        # twice a number is exact; what is not deterministic differs by rounding
        difference = (gradient - 2 * single).abs().max().item()
        allowed = 0.0 if bench.subject.spec.capabilities.deterministic else 16 * torch.finfo(bench.dtype).eps
        require(
            difference <= allowed * single.abs().max().item(),
            f"{GRADIENTS[role]} of two equal batches is not twice that of one: off by {difference:.3g}",
        )
    module.zero_grad(set_to_none=True)


@training_check("mode/compile", needs={"compile"}, layouts=TYPICAL)
def compiled(bench: ExpertsBench) -> None:
    """`torch.compile(fullgraph=True)`, forward and backward, and again on another number of tokens."""
    torch._dynamo.reset()
    # on the CPU Inductor would need a C++ compiler, and what is asked is whether the graph is whole and right
    backend = "inductor" if bench.subject.device == "cuda" else "aot_eager"
    found = []
    for seed in range(SEEDS):
        module = bench.backed(UNIFORM, seed, "training")

        def call(module: nn.Module, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
            y: Tensor = torch.compile(module, fullgraph=True, backend=backend)(x, ids, shares)
            return y

        found.append(bench.outcome(UNIFORM, seed, bench.inputs(UNIFORM, seed), module, backward=True, call=call))
    bench.judge(bench.compare(name, "compiled", found) for name in ("y", *bench.names))


class Captured:
    """A call in a CUDA graph, replayed on other inputs of the same shape."""

    def __init__(self, inputs: ExpertsInputs, call: Callable[[Tensor, Tensor, Tensor, Tensor], dict[str, Tensor]]):
        self.static = [t.cuda() for t in (inputs.x, inputs.ids, inputs.shares, inputs.cotangent)]
        stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                call(*self.static)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = call(*self.static)

    def __call__(self, inputs: ExpertsInputs) -> dict[str, Tensor]:
        for static, new in zip(self.static, (inputs.x, inputs.ids, inputs.shares, inputs.cotangent), strict=True):
            static.copy_(new)
        self.graph.replay()
        return {name: t.clone() for name, t in self.out.items()}


def replayed(bench: ExpertsBench, run: Captured, *, backward: bool) -> list[Outcome]:
    found = []
    for seed in range(SEEDS):
        drawn = bench.inputs(UNIFORM, 0)
        order = torch.randperm(len(drawn.x), generator=bench.generator("graph", seed))
        drawn = replace(drawn, x=drawn.x[order], ids=drawn.ids.flip(0), shares=drawn.shares[order])
        outcome = bench.outcome(UNIFORM, 0, drawn, bench.stock(UNIFORM, 0), backward=backward)
        found.append(replace(outcome, got={**run(outcome.inputs)}))
    return found


@experts_check("mode/cuda_graph", needs={"no_host_sync"}, device="cuda", layouts=TYPICAL)
def cuda_graph(bench: ExpertsBench) -> None:
    """Captured once and replayed on other inputs of the same shape."""
    module = bench.backed(UNIFORM, 0)

    def call(x: Tensor, ids: Tensor, shares: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"y": module(x, ids, shares)}

    found = replayed(bench, Captured(bench.inputs(UNIFORM, 0), call), backward=False)
    bench.judge([bench.compare("y", "CUDA graph", found)])


@training_check("mode/cuda_graph_backward", needs={"no_host_sync"}, device="cuda", layouts=TYPICAL)
def cuda_graph_backward(bench: ExpertsBench) -> None:
    """Forward and backward captured as one graph."""
    module = bench.backed(UNIFORM, 0, "training")
    weights = weights_of(module)

    def call(x: Tensor, ids: Tensor, shares: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
        x, shares = x.detach().requires_grad_(), shares.detach().requires_grad_()
        y = module(x, ids, shares)
        gradients = torch.autograd.grad(y, (x, shares, *weights.values()), cotangent)
        names = ("y", "dX", "d_router", *(GRADIENTS[role] for role in weights))
        return dict(zip(names, (y.detach(), *gradients), strict=True))

    found = replayed(bench, Captured(bench.inputs(UNIFORM, 0), call), backward=True)
    bench.judge(bench.compare(name, "CUDA graph", found) for name in ("y", *bench.names))


@training_check("mode/lora", needs={"parametrized"}, layouts=TYPICAL)
def lora(bench: ExpertsBench) -> None:
    """LoRA on the experts through parametrizations: the output and the gradients of the small matrices."""
    device = bench.subject.device
    outcomes = []
    for seed in range(SEEDS):
        stock = copy.deepcopy(bench.stock(UNIFORM, seed)).train()
        parametrize(stock, bench.generator("lora", seed))
        module = copy.deepcopy(stock)
        bench.put_in_place(module)
        inputs = bench.inputs(UNIFORM, seed)
        outcomes.append(
            (_lora_run(module, inputs, device), _lora_run(stock, inputs, device), _lora_expected(bench, stock, inputs))
        )
    names = outcomes[0][2].keys()
    bench.judge(
        measure(name, "LoRA", *([found[which][name] for found in outcomes] for which in range(3))) for name in names
    )


def _adapters(module: nn.Module) -> dict[str, LowRank]:
    return {name: m for name, m in module.named_modules() if isinstance(m, LowRank)}


def _lora_run(module: nn.Module, inputs: ExpertsInputs, device: str) -> dict[str, Tensor]:
    module.zero_grad(set_to_none=True)
    y = module(inputs.x.to(device), inputs.ids.to(device), inputs.shares.to(device))
    y.backward(inputs.cotangent.to(device))
    found = {"y": y.detach()}
    for name, adapter in _adapters(module).items():
        for side in ("left", "right"):
            gradient = getattr(adapter, side).grad
            require(gradient is not None, f"{name}.{side} has no gradient: the backend reads the frozen weight")
            found[f"{name.split('.')[1]}.{side}"] = gradient
    return found


def _lora_expected(bench: ExpertsBench, stock: nn.Module, inputs: ExpertsInputs) -> dict[str, Tensor]:
    """In float64: the reference on `weight + left right`, differentiated by left and right."""
    wanted: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    plain = weights_of(bench.stock(UNIFORM, 0)).keys()
    adapters = {name.split(".")[1]: adapter for name, adapter in _adapters(stock).items()}
    module: Any = stock
    up = "gate_up_proj" if bench.layout.name != "ungated" else "up_proj"
    for role in plain:
        name = {"up": up, "down": "down_proj", "up_bias": f"{up}_bias", "down_bias": "down_proj_bias"}[role]
        if name not in adapters:
            (weights[role],) = reference.raise_to_double(getattr(module, name))
            continue
        original = module.parametrizations[name].original
        (raised,) = reference.raise_to_double(original)
        left, right = reference.raise_to_double(adapters[name].left, adapters[name].right, grad=True)
        wanted[f"{name}.left"], wanted[f"{name}.right"] = left, right
        weights[role] = raised + left @ right
    x, shares, cotangent = reference.raise_to_double(inputs.x, inputs.shares, inputs.cotangent)
    y = reference.experts(bench.layout.formula(stock), weights, x, inputs.ids, shares)
    torch.autograd.backward(y, cotangent)
    found = {"y": y.detach()}
    for name, leaf in wanted.items():
        assert leaf.grad is not None
        found[name] = leaf.grad
    return found


@experts_check("mode/switch", layouts=TYPICAL)
def switch(bench: ExpertsBench) -> None:
    """To the backend, back to stock and to the backend again: stock computes what it did, bit for bit."""
    module, inputs = copy.deepcopy(bench.stock(UNIFORM, 0)), bench.inputs(UNIFORM, 0)

    def run() -> Tensor:
        y = run_module(module, inputs, bench.subject.device, backward=False)["y"]
        assert y is not None
        return y

    stock = run()
    bench.put_in_place(module)
    ours = run()
    reset_moe_backend(module)
    require(torch.equal(run(), stock), "after a reset the stock module computes something else than before")
    bench.put_in_place(module)
    again = run()
    if bench.subject.spec.capabilities.deterministic:
        require(torch.equal(again, ours), "set again, the backend computes something else than the first time")


@experts_check("mode/weights_written", layouts=TYPICAL)
def weights_written(bench: ExpertsBench) -> None:
    """Weights changed in place, as every optimiser step does: nothing stale is kept."""
    module = copy.deepcopy(bench.stock(UNIFORM, 0))
    bench.put_in_place(module)
    inputs = bench.inputs(UNIFORM, 0)
    run_module(module, inputs, bench.subject.device, backward=False)
    other = bench.stock(UNIFORM, 1)
    with torch.no_grad():
        for parameter, new in zip(module.parameters(), other.parameters(), strict=True):
            parameter.copy_(new)
    bench.judge([bench.compare("y", "weights changed", [bench.outcome(UNIFORM, 1, inputs, module, backward=False)])])
