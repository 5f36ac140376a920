"""The bench of dispatchers: one model in this process, and the same sharded over ranks with the dispatcher in place.

The experts module of a sharded model is called directly, with tokens and routings chosen rank by rank, and compared
with the float64 reference on the batches of all ranks together. The unit is the error of the same experts function in
one process, so that what is measured is the dispatcher and not what it dispatches to.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn

from hf_moe_conformance import zoo
from hf_moe_conformance.cases import (
    GRADIENTS,
    ExpertsInputs,
    ExpertsLayout,
    Routing,
    balanced,
    draw_seed,
    duplicates,
    experts_layouts,
    few_experts,
    fill,
    uniform,
    zipf,
)
from hf_moe_conformance.check import Bench, Failure, Layout, NotApplicable, Variant, require
from hf_moe_conformance.checks import dispatcher_ranks as ranks
from hf_moe_conformance.checks.dispatcher_ranks import Refused, Sharded
from hf_moe_conformance.checks.experts_bench import SEEDS, Tensors, run_module, run_reference
from hf_moe_conformance.measures import Measure, measure
from hf_moe_conformance.ranks import World, world
from hf_moe_conformance.subject import Subject


@dataclass(frozen=True, kw_only=True)
class ParallelLayout(Layout):
    """How a model is spread over ranks.

    Attributes:
        fsdp, tp, ep: sizes, as `DistributedConfig` has them. The ranks of a TP group share a batch.
        family: of the zoo.
        weights: the experts layout of that family.
    """

    fsdp: int = 1
    tp: int = 1
    ep: int
    family: str = "qwen3_moe"
    weights: str = "default"

    @property
    def sizes(self) -> dict[str, int | bool]:
        if Version(transformers.__version__) < Version("5.19"):
            return {"tp_size": self.tp, "enable_expert_parallel": True}
        return {"fsdp_size": self.fsdp, "tp_size": self.tp, "ep_size": self.ep}

    @property
    def experts(self) -> ExpertsLayout:
        return next(layout for layout in experts_layouts() if layout.name == self.weights)


@cache
def parallel_layouts() -> tuple[ParallelLayout, ...]:
    def layout(name: str, **how: Any) -> ParallelLayout:
        fsdp, tp = how.get("fsdp", 1), how.get("tp", 1)
        return ParallelLayout(name=name, ranks=fsdp * tp, missing=_why_missing(fsdp, tp, how["ep"]), **how)

    biased: dict[str, Any] = {"family": "gpt_oss", "weights": "interleaved"}
    return (
        layout("ep2", fsdp=2, ep=2),
        layout("ep2_bias", fsdp=2, ep=2, **biased),
        layout("tp2_ep2", tp=2, ep=2),
        layout("tp2_ep2_bias", tp=2, ep=2, **biased),
        layout("ep4", fsdp=4, ep=4),
        layout("fsdp4_ep2", fsdp=4, ep=2),
        layout("tp2_fsdp2_ep2", tp=2, fsdp=2, ep=2),
        layout("tp2_fsdp2_ep4", tp=2, fsdp=2, ep=4),
    )


def _why_missing(fsdp: int, tp: int, ep: int) -> str | None:
    """Why this version of Transformers cannot load it."""
    version = Version(transformers.__version__)
    if version < Version("5.19") and (fsdp > 1 or ep != tp):
        return f"Transformers {version} spreads experts over the ranks of a TP group only, without FSDP (5.20 has more)"
    if version < Version("5.20") and ep != tp:
        return f"Transformers {version} needs ep_size == tp_size (5.20 does not)"
    return None


Lengths = Callable[[int, int], list[int]]
"""(a number of tokens, the number of batches) -> the tokens of each batch. Where TP ranks share the one batch there is,
what is uneven or empty is a rank's slice of it."""


def equal(tokens: int, batches: int) -> list[int]:
    return [tokens] * batches


def uneven(tokens: int, batches: int) -> list[int]:
    return [(tokens + 1, 1, 2 * tokens, 7)[batch % 4] for batch in range(batches)]


def first_empty(tokens: int, batches: int) -> list[int]:
    return [0] + [tokens] * (batches - 1) if batches > 1 else [1]


def last_empty(tokens: int, batches: int) -> list[int]:
    return [tokens] * (batches - 1) + [0] if batches > 1 else [1]


def no_tokens(tokens: int, batches: int) -> list[int]:
    return [0] * batches


@dataclass(frozen=True, kw_only=True)
class DispatchCase:
    """The lengths of the batches and a routing.

    Attributes:
        tokens: a range that a number is drawn from. It divides by 4, so that lengths and slices are equal unless
            `lengths` makes them otherwise.
        target: the rank of the expert group that every token goes to, or None.
    """

    name: str
    routing: Routing = uniform
    lengths: Lengths = equal
    tokens: tuple[int, int] = (24, 60)
    top_k: int = 2
    target: int | None = None


CASES = (
    DispatchCase(name="uniform"),
    DispatchCase(name="balanced", routing=balanced),
    DispatchCase(name="few experts", routing=few_experts),
    DispatchCase(name="duplicates", routing=duplicates, top_k=3),
    DispatchCase(name="one expert a token", top_k=1),
    DispatchCase(name="every expert", top_k=8),
    DispatchCase(name="large", routing=zipf, tokens=(256, 512), top_k=4),
)
UNIFORM = CASES[0]
UNEVEN = DispatchCase(name="uneven", lengths=uneven)
EMPTY = (
    DispatchCase(name="the first without tokens", lengths=first_empty),
    DispatchCase(name="the last without tokens", lengths=last_empty),
)
NO_TOKENS = DispatchCase(name="no tokens", lengths=no_tokens)


Change = Callable[[ExpertsInputs], ExpertsInputs]


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One draw of a case: what came of it.

    Attributes:
        lengths: of each batch.
        got: of each rank.
        unit, expected: of all batches one after the other, in one process and by the reference.
    """

    lengths: list[int]
    got: list[Tensors]
    unit: Tensors
    expected: Tensors


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars of saving and loading."""
    shown = transformers.logging.is_progress_bar_enabled()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.logging.enable_progress_bar()


class DispatcherBench(Bench):
    """One dispatcher on one dtype and one way of sharding."""

    layout: ParallelLayout

    def __init__(self, subject: Subject, variant: Variant):
        super().__init__(subject, variant)
        assert isinstance(variant.layout, ParallelLayout)
        self.layout, self.dtype = variant.layout, variant.torch_dtype
        self._folder = Path(tempfile.mkdtemp(prefix="hf-moe-checkpoint-"))
        weakref.finalize(self, shutil.rmtree, self._folder)
        self._draws: dict[bool, dict[str, list[Draw]]] = {}

    @classmethod
    def layouts(cls) -> Sequence[Layout]:
        return parallel_layouts()

    def refusal(self, needs: frozenset[str]) -> str | None:
        said = self.world.run(ranks.placed, self.on_each(self.sharded(training="training" in needs)))[0]
        return said.message if isinstance(said, Refused) else None

    @property
    def world(self) -> World:
        return world(self.subject.device, self.layout.ranks)

    @property
    def batches(self) -> int:
        return self.layout.fsdp

    def batch_of(self, rank: int) -> int:
        return rank // self.layout.tp

    @property
    def names(self) -> tuple[str, ...]:
        return ("dX", "d_router", *self.weights)

    @property
    def weights(self) -> tuple[str, ...]:
        """The weights' gradients."""
        return tuple(GRADIENTS[role] for role in self.layout.experts.weights)

    def generator(self, *what: object) -> torch.Generator:
        return draw_seed(self.subject.seed, str(self.variant), *what)

    # Models

    def checkpoint(self, name: str, **sizes: Any) -> str:
        """A saved tiny model, made once."""
        path = self._folder / name
        if not path.exists():
            model = zoo.build(self.layout.family, **sizes)
            for index, module in enumerate(zoo.experts_modules(model)):
                # the same for all layouts of one family
                fill(module, draw_seed(self.subject.seed, self.layout.family, name, index))
            with _quiet():
                model.to(self.dtype).save_pretrained(path)
        return str(path)

    @property
    def _model_class(self) -> str:
        return zoo.FAMILIES[self.layout.family].model

    def sharded(self, *, training: bool, name: str = "one_layer", **sizes: Any) -> Sharded:
        return Sharded(
            path=self.checkpoint(name, **(sizes or {"num_hidden_layers": 1})),
            model_class=self._model_class,
            dtype=self.dtype,
            sizes=self.layout.sizes,
            batches=self.batches,
            backend=self.subject.config.to_dict(),
            training=training,
        )

    def one_process(self, sharded: Sharded, experts: str = ranks.EXPERTS) -> Any:
        """The same model in this process, by default on the same experts function."""
        with _quiet():
            model: Any = getattr(transformers, sharded.model_class).from_pretrained(
                sharded.path, dtype=sharded.dtype, experts_implementation=experts
            )
        return model.to(self.subject.device).train(sharded.training)

    @cached_property
    def stock(self) -> nn.Module:
        return ranks.experts(self.one_process(self.sharded(training=False)))  # type: ignore[no-any-return]

    # Runs

    def on_ranks(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """What a function of `dispatcher_ranks` returns on each rank.

        Raises:
            NotApplicable: the dispatcher says no to this way of sharding.
            Failure: it says so on some ranks only, or its constructor fails.
        """
        found = self.world.run(function, arguments)
        refused = found[0]
        if not isinstance(refused, Refused):
            return found
        if not refused.meant:
            raise Failure([f"it cannot be set: {refused.message}"])
        raise NotApplicable(refused.message)

    def on_each(self, *arguments: Any) -> list[tuple[Any, ...]]:
        return [arguments] * self.layout.ranks

    def inputs(self, case: DispatchCase, seed: int, stock: Any = None) -> list[ExpertsInputs]:
        """One a batch, for the experts `stock` or those of the one-layer model."""
        generator = self.generator(case.name, seed)
        stock = self.stock if stock is None else stock
        low, high = case.tokens
        tokens = 4 * int(torch.randint(low // 4, high // 4, (1,), generator=generator))
        local = stock.num_experts // self.layout.ep
        found = []
        for length in case.lengths(tokens, self.batches):
            if case.target is None:
                ids = case.routing(length, stock.num_experts, case.top_k, generator)
            else:
                ids = case.target * local + case.routing(length, local, case.top_k, generator)
            x, cotangent = (torch.randn(length, stock.config.hidden_size, generator=generator) for _ in range(2))
            shares = torch.randn(length, case.top_k, generator=generator).softmax(-1)
            found.append(
                ExpertsInputs(
                    x=x.to(self.dtype), ids=ids, shares=shares.to(self.dtype), cotangent=cotangent.to(self.dtype)
                )
            )
        return found

    def draws(
        self, cases: Sequence[DispatchCase], *, how: str = "backward", change: Change | None = None
    ) -> dict[str, list[Draw]]:
        """`SEEDS` draws of each case, by its name, all in one run of the ranks.

        Args:
            how: as `dispatcher_ranks.modules` has it.
            change: what to do to the inputs of every batch.
        """
        batches = [self.inputs(case, seed) for case in cases for seed in range(SEEDS)]
        if change is not None:
            batches = [[change(inputs) for inputs in each] for each in batches]
        sharded = self.sharded(training=how != "forward")
        arguments = [
            (sharded, [each[self.batch_of(rank)] for each in batches], how) for rank in range(self.layout.ranks)
        ]
        found = self.on_ranks(ranks.modules, arguments)
        drawn = [self.draw(each, [on_rank[i] for on_rank in found], how) for i, each in enumerate(batches)]
        return {case.name: drawn[i * SEEDS : (i + 1) * SEEDS] for i, case in enumerate(cases)}

    def draw(self, batches: Sequence[ExpertsInputs], got: list[Tensors], how: str, stock: Any = None) -> Draw:
        """With the reference's results, and one process's, beside what the ranks have."""
        stock = self.stock if stock is None else stock
        together = ExpertsInputs(
            **{name: torch.cat([getattr(b, name) for b in batches]) for name in ("x", "ids", "shares", "cotangent")}
        )
        backward = how != "forward"
        return Draw(
            lengths=[len(b.x) for b in batches],
            got=got,
            unit=run_module(stock, together, self.subject.device, backward=backward),
            expected=run_reference(self.layout.experts, stock, together, backward=backward),
        )

    def case(self, case: DispatchCase, *, backward: bool) -> list[Draw]:
        """The draws of one of `CASES`. All of them are run at once, and once a bench."""
        if backward not in self._draws:
            self._draws[backward] = self.draws(CASES, how="backward" if backward else "forward")
        return self._draws[backward][case.name]

    def compare(self, tensor: str, case: str, draws: Sequence[Draw]) -> Measure:
        """One tensor over several draws, on all ranks: ranks that share a batch must have the same.

        Raises:
            Failure: there is none, or one of another shape or dtype.
        """
        got, unit, expected = [], [], []
        for draw in draws:
            theirs, wanted = draw.unit[tensor], draw.expected[tensor]
            assert theirs is not None and wanted is not None
            if tensor in self.weights:  # every rank has the same whole
                parts = [(0, theirs, wanted)]
            else:
                starts = [sum(draw.lengths[:batch]) for batch in range(self.batches)]
                rows = [slice(start, start + length) for start, length in zip(starts, draw.lengths, strict=True)]
                on = [rows[self.batch_of(rank)] for rank in range(self.layout.ranks)]
                parts = [(rank, theirs[where], wanted[where]) for rank, where in enumerate(on)]
            for rank, part, reference in parts:
                ours = draw.got[rank][tensor]
                where = f"{tensor} ({case}) on rank {rank}"
                if ours is None:
                    raise Failure([f"{where}: there is no gradient"])
                shape = tuple(reference.shape)
                require(ours.shape == reference.shape, f"{where} has shape {tuple(ours.shape)}, expected {shape}")
                require(ours.dtype == part.dtype, f"{where} is {ours.dtype}, in one process {part.dtype}")
                got.append(ours)
                unit.append(part)
                expected.append(reference)
        return measure(tensor, case, got, unit, expected)
