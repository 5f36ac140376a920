"""The checks of dispatchers, on 2 and 4 ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hf_moe_conformance import zoo
from hf_moe_conformance.cases import ExpertsInputs
from hf_moe_conformance.check import check, require
from hf_moe_conformance.checks import dispatcher_ranks as ranks
from hf_moe_conformance.checks.dispatcher_bench import (
    CASES,
    EMPTY,
    NO_TOKENS,
    UNEVEN,
    UNIFORM,
    DispatchCase,
    DispatcherBench,
    Draw,
)
from hf_moe_conformance.checks.experts_bench import SEEDS, Tensors
from hf_moe_conformance.checks.model import GRADIENTS as GRADIENT_LIMIT
from hf_moe_conformance.checks.model import LOGITS as LOGITS_LIMIT
from hf_moe_conformance.checks.model import compare as compare_models
from hf_moe_conformance.checks.model import worst

dispatcher_check = partial(check, kind="dispatcher", bench=DispatcherBench, tier="ep")
training_check = partial(dispatcher_check, needs={"training"})

TYPICAL = ("ep2", "tp2_ep2", "fsdp4_ep2")
"""Layouts for checks of how a dispatcher is called: its own batch on each rank, one that ranks share, several expert
groups."""


@dispatcher_check("forward")
def forward(bench: DispatcherBench) -> None:
    """The output on every rank, on every routing."""
    bench.judge(bench.compare("y", case.name, bench.case(case, backward=False)) for case in CASES)


@dispatcher_check("edge/router_dtype")
def router_dtype(bench: DispatcherBench) -> None:
    """Router weights of another dtype than the tokens'; half of the families give float32 under bfloat16."""
    other = torch.bfloat16 if bench.dtype == torch.float32 else torch.float32
    draws = bench.draws([UNIFORM], how="forward", change=lambda inputs: replace(inputs, shares=inputs.shares.to(other)))
    bench.judge([bench.compare("y", f"{other} shares", draws[UNIFORM.name])])


def _gradient(tensor: str, bench: DispatcherBench) -> None:
    bench.judge(bench.compare(tensor, case.name, bench.case(case, backward=True)) for case in CASES)


for _tensor in ("dX", "d_router"):
    training_check(f"grad/{_tensor}")(partial(_gradient, _tensor))


@training_check("grad/weights")
def weights(bench: DispatcherBench) -> None:
    """The experts' weights and biases, summed over the tokens of all ranks."""
    bench.judge(
        bench.compare(tensor, case.name, bench.case(case, backward=True)) for case in CASES for tensor in bench.weights
    )


# Edges: what makes ranks differ.


def _everything(bench: DispatcherBench, draws: dict[str, list[Draw]]) -> None:
    bench.judge(
        bench.compare(tensor, case, of_case) for case, of_case in draws.items() for tensor in ("y", *bench.names)
    )


@training_check("edge/uneven_tokens")
def uneven_tokens(bench: DispatcherBench) -> None:
    """Another number of tokens on each rank."""
    _everything(bench, bench.draws([UNEVEN]))


@training_check("edge/empty_rank")
def empty_rank(bench: DispatcherBench) -> None:
    """A rank without tokens. Its experts serve the others, and their gradients come."""
    _everything(bench, bench.draws(EMPTY))


@training_check("edge/no_tokens")
def no_tokens(bench: DispatcherBench) -> None:
    """No tokens anywhere: no rows, and gradients of zero or none."""
    # nothing to measure
    batches = bench.inputs(NO_TOKENS, 0)
    arguments = [
        (bench.sharded(training=True), [batches[bench.batch_of(rank)]], "backward")
        for rank in range(bench.layout.ranks)
    ]
    for rank, (got,) in enumerate(bench.on_ranks(ranks.modules, arguments)):
        y, dx = got["y"], got["dX"]
        require(y.shape == batches[0].x.shape, f"no tokens give {tuple(y.shape)} on rank {rank}")
        require(dx is not None, f"no tokens give no dX on rank {rank}: ranks without tokens would hang")
        for name in bench.weights:
            require(got[name] is None or not got[name].any(), f"{name} is not zero without tokens")


@training_check("edge/one_rank")
def one_rank(bench: DispatcherBench) -> None:
    """Every token goes to the experts of one rank, to each rank in turn. The others have tokens and no work."""
    cases = tuple(
        DispatchCase(name=f"all to rank {rank}", target=rank, tokens=(64, 128)) for rank in range(bench.layout.ep)
    )
    _everything(bench, bench.draws(cases))


@training_check("edge/strided", layouts=TYPICAL)
def strided(bench: DispatcherBench) -> None:
    """Inputs that are views with other strides, and a cotangent that is one number expanded, as a sum gives it."""

    def views(inputs: ExpertsInputs) -> ExpertsInputs:
        return ExpertsInputs(
            x=torch.cat([inputs.x, inputs.x], dim=1)[:, : inputs.x.shape[1]],
            ids=inputs.ids.t().contiguous().t(),
            shares=inputs.shares.t().contiguous().t(),
            cotangent=inputs.cotangent.new_ones(()).expand(inputs.cotangent.shape),
        )

    _everything(bench, bench.draws([UNIFORM], change=views))


# Modes: how the module is run.


@training_check("mode/checkpoint", layouts=TYPICAL)
def checkpointing(bench: DispatcherBench) -> None:
    """Under activation checkpointing, which runs the forward again in the backward."""
    _everything(bench, bench.draws([UNIFORM], how="checkpoint"))


@training_check("mode/two_models", dtypes=["float32"], layouts=TYPICAL)
def two_models(bench: DispatcherBench) -> None:
    """Another model of other sizes runs between the forward and the backward of the first."""
    sharded = bench.sharded(training=True)
    other = bench.sharded(
        training=True, name="other", num_hidden_layers=1, hidden_size=96, num_experts=16, moe_intermediate_size=48
    )
    stocks = bench.stock, ranks.experts(bench.one_process(other))
    draws: list[list[Draw]] = [[], []]
    for seed in range(SEEDS):
        # fewer tokens, more, and others: what one call leaves behind does for no other
        other_case = (replace(UNIFORM, tokens=(8, 16)), replace(UNIFORM, tokens=(96, 128)), UNEVEN)[seed]
        inputs = [bench.inputs(case, seed, stock) for case, stock in zip((UNIFORM, other_case), stocks, strict=True)]
        arguments = [
            (sharded, other, *(each[bench.batch_of(rank)] for each in inputs)) for rank in range(bench.layout.ranks)
        ]
        found = bench.on_ranks(ranks.two_models, arguments)
        for which, stock in enumerate(stocks):
            draws[which].append(bench.draw(inputs[which], [on_rank[which] for on_rank in found], "backward", stock))
    bench.judge(
        bench.compare(tensor, f"model {which + 1} of two", draws[which])
        for which in range(2)
        for tensor in ("y", *bench.names)
    )


# Whole models. Each rank has a batch of its own, longer from rank to rank.


def _whole_models(bench: DispatcherBench, *, training: bool) -> tuple[list[Tensors], list[Tensor], Tensors]:
    """What each rank has, the logits of each batch in one process, and there the gradients summed over the batches."""
    sharded = bench.sharded(training=training, name="whole", num_hidden_layers=2)
    stock = bench.one_process(sharded, experts="eager")
    batches, logits = [], []
    for batch in range(bench.batches):
        inputs = zoo.sample_inputs(stock, length=12 + 5 * batch, seed=batch)
        on_device = {name: t.to(bench.subject.device) for name, t in inputs.items()}
        with torch.set_grad_enabled(training):
            y = zoo.output(stock, on_device)
        cotangent = torch.randn(y.shape, generator=bench.generator("cotangent", batch))
        if training:
            torch.autograd.backward(y, cotangent.to(y))
        batches.append((inputs, cotangent))
        logits.append(y.detach().cpu())
    arguments = [(sharded, *batches[bench.batch_of(rank)]) for rank in range(bench.layout.ranks)]
    gradients = {name: None if p.grad is None else p.grad.cpu() for name, p in stock.named_parameters()}
    return bench.on_ranks(ranks.whole_model, arguments), logits, gradients


@dispatcher_check("model/logits", dtypes=["float32"])
def model_logits(bench: DispatcherBench) -> None:
    """The logits of a whole model, on every rank."""
    found, logits, _ = _whole_models(bench, training=False)
    measures = []
    for rank, got in enumerate(found):
        y = got["y"]
        assert y is not None
        measures.append(compare_models("logits", f"rank {rank}", y, logits[bench.batch_of(rank)], LOGITS_LIMIT))
    bench.judge(measures)


@training_check("model/gradients", dtypes=["float32"])
def model_gradients(bench: DispatcherBench) -> None:
    """The gradient of every parameter of a whole model."""
    found, _, gradients = _whole_models(bench, training=True)
    measures = []
    for name, expected in gradients.items():
        got = found[0][name]
        require((got is None) == (expected is None), f"{name} has {'no' if got is None else 'a'} gradient")
        if got is not None and expected is not None:
            measures.append(compare_models("gradient", name, got, expected, GRADIENT_LIMIT))
    bench.judge([worst(measures)])


# Exceptions. Under gloo the other ranks see that a connection closed; under nccl the launcher ends them.


def _raises(bench: DispatcherBench, when: str) -> None:
    culprit = bench.layout.ranks - 1
    inputs = bench.inputs(UNIFORM, 0)
    sharded = bench.sharded(training=True)
    bench.on_ranks(ranks.placed, bench.on_each(sharded))  # where it is refused nothing is to be raised
    ended = bench.world.attempt(
        ranks.raising,
        [(sharded, inputs[bench.batch_of(rank)], culprit, when) for rank in range(bench.layout.ranks)],
    )
    how = {f"rank {rank}": e.how for rank, e in enumerate(ended)}
    require(
        ended[culprit].how == "raised" and ranks.PLANTED in ended[culprit].text,
        f"the experts of rank {culprit} raised in their {when} and the dispatcher did not let it out: {how}\n"
        f"{ended[culprit].text}",
    )
    left = [rank for rank, e in enumerate(ended) if e.how == "returned"]
    require(not left, f"rank {culprit} raised in its {when}, and {left} went on without it: {how}")
    if bench.subject.device == "cpu":
        hung = [e.text for e in ended if e.how == "hung"]
        require(not hung, f"rank {culprit} raised in its {when} and is gone, and others still wait: {how}\n{hung[:1]}")


dispatcher_check("exception/forward", needs={"training"}, dtypes=["float32"], layouts=("ep2", "tp2_ep2", "ep4"))(
    partial(_raises, when="forward")
)
dispatcher_check("exception/backward", needs={"training"}, dtypes=["float32"], layouts=("ep2", "tp2_ep2"))(
    partial(_raises, when="backward")
)
