"""The checks of loss backends, through the model's own `loss_function`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_backends import reset_moe_backend
from hf_moe_conformance import reference, zoo
from hf_moe_conformance.cases import draw_seed
from hf_moe_conformance.check import Bench, Layout, Variant, check, require
from hf_moe_conformance.measures import Measure, measure
from hf_moe_conformance.subject import Subject

SEEDS = 5
"""More than elsewhere, since a loss is one number a draw."""


@dataclass(frozen=True, kw_only=True)
class LossCase:
    """How a loss is asked for.

    Attributes:
        items: `num_items_in_batch`, as gradient accumulation and data parallelism give it: None, an int or a tensor.
        ignore: the label that does not count.
        shifted: whether the labels are given shifted already.
        scale: of the logits.
    """

    name: str
    items: str | None = None
    ignore: int = -100
    shifted: bool = False
    scale: float = 1.0


MEAN = LossCase(name="mean")
ITEMS = (LossCase(name="items, an int", items="int"), LossCase(name="items, a tensor", items="tensor"))
IGNORE = LossCase(name="another ignore_index", ignore=7)
SHIFTED = LossCase(name="shifted labels", shifted=True)
LARGE = LossCase(name="logits in the hundreds", scale=100.0)


@dataclass(frozen=True, kw_only=True)
class LossLayout(Layout):
    """A vocabulary's size."""

    vocabulary: int = field(repr=False)


@cache
def loss_layouts() -> tuple[LossLayout, ...]:
    return (
        LossLayout(name="vocabulary_128", vocabulary=128),
        # beyond any block, and no multiple of one
        LossLayout(name="vocabulary_5003", vocabulary=5003),
    )


class LossBench(Bench):
    """One loss backend on one dtype and vocabulary."""

    layout: LossLayout

    def __init__(self, subject: Subject, variant: Variant):
        super().__init__(subject, variant)
        assert isinstance(variant.layout, LossLayout)
        self.layout, self.dtype = variant.layout, variant.torch_dtype
        model = zoo.build("qwen3_moe", num_hidden_layers=1, vocab_size=self.layout.vocabulary)
        self.stock: Any = model.to(self.dtype).to(subject.device)
        self._backed: dict[bool, Any] = {}

    @classmethod
    def layouts(cls) -> Sequence[Layout]:
        return loss_layouts()

    def candidate(self, needs: frozenset[str]) -> nn.Module:
        model: nn.Module = copy.deepcopy(self.stock).train("training" in needs)
        return model

    def backed(self, *, training: bool) -> Any:
        if training not in self._backed:
            model = self.candidate(frozenset({"training"} if training else ()))
            self.put_in_place(model)
            self._backed[training] = model
        return self._backed[training]

    def draw(self, case: LossCase, seed: int) -> tuple[Tensor, Tensor]:
        """Logits (B, S, V), and labels (B, S) of which a third do not count."""
        generator = draw_seed(self.subject.seed, str(self.variant), case.name, seed)
        tokens = 17 + 2 * int(torch.randint(8, (1,), generator=generator))
        logits = case.scale * torch.randn(2, tokens, self.layout.vocabulary, generator=generator)
        labels = torch.randint(self.layout.vocabulary, (2, tokens), generator=generator)
        ignored = torch.rand(labels.shape, generator=generator) < 0.33
        return logits.to(self.dtype), labels.masked_fill(ignored, case.ignore)

    def run(self, model: Any, case: LossCase, logits: Tensor, labels: Tensor, *, call: Any = None) -> dict[str, Tensor]:
        device = self.subject.device
        logits = logits.detach().to(device).requires_grad_()
        labels = labels.to(device)
        how: dict[str, Any] = {"ignore_index": case.ignore} if case.ignore != -100 else {}
        if case.items:
            how["num_items_in_batch"] = torch.tensor(101, device=device) if case.items == "tensor" else 101
        if case.shifted:
            how["shift_labels"] = labels
        function = model.loss_function if call is None else call(model.loss_function)
        loss = function(logits, None if case.shifted else labels, self.layout.vocabulary, **how)
        loss.backward()
        assert logits.grad is not None
        return {"loss": loss.detach(), "d_logits": logits.grad}

    def expected(self, case: LossCase, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        (raised,) = reference.raise_to_double(logits, grad=True)
        targets = labels if case.shifted else torch.cat([labels[:, 1:], labels.new_full((2, 1), case.ignore)], dim=1)
        rows = raised.reshape(-1, raised.shape[-1])
        loss = reference.cross_entropy(rows, targets.reshape(-1), ignore=case.ignore, items=101 if case.items else None)
        torch.autograd.backward(loss)
        return {"loss": loss.detach(), "d_logits": raised.grad}

    def measures_of(
        self, case: LossCase, names: Sequence[str], *, training: bool = False, call: Any = None
    ) -> list[Measure]:
        runs = []
        for seed in range(SEEDS):
            logits, labels = self.draw(case, seed)
            model = self.backed(training=training)
            runs.append(
                (
                    self.run(model, case, logits, labels, call=call),
                    self.run(self.stock, case, logits, labels),
                    self.expected(case, logits, labels),
                )
            )
        return [measure(name, case.name, *([run[which][name] for run in runs] for which in range(3))) for name in names]


loss_check = partial(check, kind="loss", bench=LossBench)
training_check = partial(loss_check, tier="training")


@loss_check("forward")
def forward(bench: LossBench) -> None:
    """The mean over the labels that count."""
    bench.judge(bench.measures_of(MEAN, ["loss"]))


@loss_check("num_items")
def num_items(bench: LossBench) -> None:
    """The sum over `num_items_in_batch`: what makes gradient accumulation right."""
    bench.judge(m for case in ITEMS for m in bench.measures_of(case, ["loss"]))


@loss_check("ignore_index")
def ignore_index(bench: LossBench) -> None:
    """Another label that does not count."""
    bench.judge(bench.measures_of(IGNORE, ["loss"]))


@loss_check("shift_labels")
def shift_labels(bench: LossBench) -> None:
    """Labels that were shifted before, as sequence parallelism does it."""
    bench.judge(bench.measures_of(SHIFTED, ["loss"]))


@loss_check("edge/large_logits")
def large_logits(bench: LossBench) -> None:
    """Where a softmax without its maximum taken off overflows."""
    bench.judge(bench.measures_of(LARGE, ["loss"]))


@training_check("grad/d_logits")
def gradients(bench: LossBench) -> None:
    """The gradient of the logits, each way of asking."""
    cases = (MEAN, *ITEMS, IGNORE, SHIFTED, LARGE)
    bench.judge(m for case in cases for m in bench.measures_of(case, ["d_logits"], training=True))


@training_check("grad/ignored")
def ignored(bench: LossBench) -> None:
    """Rows whose label does not count have a gradient of exactly zero."""
    logits, labels = bench.draw(SHIFTED, 0)
    gradient = bench.run(bench.backed(training=True), SHIFTED, logits, labels)["d_logits"]
    largest = gradient[(labels == -100).to(gradient.device)].abs().max().item()
    require(largest == 0, f"d_logits of labels that do not count is up to {largest:.3g}, not zero")


@loss_check("mode/repeat", needs={"deterministic"})
def repeat(bench: LossBench) -> None:
    """The same call gives the same bits."""
    logits, labels = bench.draw(MEAN, 0)
    runs = [bench.run(bench.backed(training=False), MEAN, logits, labels) for _ in range(4)]
    for name in runs[0]:
        require(all(torch.equal(run[name], runs[0][name]) for run in runs), f"{name} differs between calls")


@training_check("mode/compile", needs={"compile"})
def compiled(bench: LossBench) -> None:
    """`torch.compile(fullgraph=True)`, forward and backward."""
    torch._dynamo.reset()
    backend = "inductor" if bench.subject.device == "cuda" else "aot_eager"
    call = partial(torch.compile, fullgraph=True, backend=backend)
    bench.judge(bench.measures_of(MEAN, ["loss", "d_logits"], training=True, call=call))


@loss_check("mode/switch")
def switch(bench: LossBench) -> None:
    """To the backend and back to stock: stock computes what it did, bit for bit."""
    model = copy.deepcopy(bench.stock)
    logits, labels = bench.draw(MEAN, 0)
    before = bench.run(model, MEAN, logits, labels)
    bench.put_in_place(model)
    bench.run(model, MEAN, logits, labels)
    reset_moe_backend(model)
    after = bench.run(model, MEAN, logits, labels)
    require(
        all(torch.equal(before[n], after[n]) for n in before), "after a reset the stock loss is another than before"
    )
