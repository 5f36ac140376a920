"""The checks of loss backends, through the model's own `loss_function`.

A fused loss takes the output head in, so that it is given hidden states through the model's head, and its gradients are
those of hidden states, weight and bias. Any other is given logits.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_backends import reset_moe_backend
from hf_moe_backends.lazy_logits import FusedLossFunction, LazyLogits
from hf_moe_conformance import reference, zoo
from hf_moe_conformance.cases import draw_seed
from hf_moe_conformance.check import Bench, Layout, Variant, check, require
from hf_moe_conformance.measures import Measure, measure
from hf_moe_conformance.subject import Subject

SEEDS = 5
"""More than elsewhere, since a loss is one number a draw."""

MULTIPLIER = 0.75
"""What capped logits are multiplied by first."""


@dataclass(frozen=True, kw_only=True)
class LossCase:
    """How a loss is asked for.

    Attributes:
        items: `num_items_in_batch`, as gradient accumulation and data parallelism give it: None, an int or a tensor.
        ignore: the label that does not count.
        shifted: whether the labels are given shifted already.
        scale: of the logits.
        softcap: the model scales and caps its logits: `softcap * tanh(MULTIPLIER * logits / softcap)`.
    """

    name: str
    items: str | None = None
    ignore: int = -100
    shifted: bool = False
    scale: float = 1.0
    softcap: float | None = None


MEAN = LossCase(name="mean")
ITEMS = (LossCase(name="items, an int", items="int"), LossCase(name="items, a tensor", items="tensor"))
IGNORE = LossCase(name="another ignore_index", ignore=7)
SHIFTED = LossCase(name="shifted labels", shifted=True)
CAPPED = LossCase(name="scaled and capped logits", scale=3.0, softcap=2.0)
LARGE = LossCase(name="logits in the hundreds", scale=100.0)


@dataclass(frozen=True, kw_only=True)
class LossLayout(Layout):
    """A vocabulary's size, and whether the output head has a bias."""

    vocabulary: int = field(repr=False)
    biased: bool = field(repr=False, default=False)


@cache
def loss_layouts() -> tuple[LossLayout, ...]:
    return (
        LossLayout(name="vocabulary_128", vocabulary=128),
        # beyond any block, and no multiple of one
        LossLayout(name="vocabulary_5003", vocabulary=5003, biased=True),
    )


class LossBench(Bench):
    """One loss backend on one dtype and vocabulary."""

    layout: LossLayout

    def __init__(self, subject: Subject, variant: Variant):
        super().__init__(subject, variant)
        assert isinstance(variant.layout, LossLayout)
        self.layout, self.dtype = variant.layout, variant.torch_dtype
        model = zoo.build("qwen3_moe", num_hidden_layers=1, vocab_size=self.layout.vocabulary)
        self.fused = subject.spec.capabilities.fuses_head
        if self.fused:
            model.lm_head = self._head(model.config.hidden_size)
        self.stock: Any = model.to(self.dtype).to(subject.device)
        self._backed: dict[bool, Any] = {}

    def _head(self, width: int) -> nn.Linear:
        """An output head whose logits have a variance of one."""
        head = nn.Linear(width, self.layout.vocabulary, bias=self.layout.biased)
        generator = draw_seed(self.subject.seed, str(self.variant), "head", 0)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * width**-0.5)
        return head

    @property
    def gradients(self) -> list[str]:
        """What a loss has gradients of."""
        if not self.fused:
            return ["d_logits"]
        return ["d_hidden", "d_weight"] + ["d_bias"] * self.layout.biased

    @classmethod
    def layouts(cls) -> Sequence[Layout]:
        return loss_layouts()

    def candidate(self, needs: frozenset[str]) -> nn.Module:
        model: nn.Module = copy.deepcopy(self.stock).train("training" in needs)
        return model

    def backed(self, *, training: bool) -> Any:
        training = training or self.fused  # which is about training: an evaluation wants the logits
        if training not in self._backed:
            model = self.candidate(frozenset({"training"} if training else ()))
            self.put_in_place(model)
            self._backed[training] = model
        return self._backed[training]

    def draw(self, case: LossCase, seed: int) -> tuple[Tensor, Tensor]:
        """Logits (B, S, V), or a fused loss's hidden states (B, S, H); labels (B, S), a third of them not to count."""
        generator = draw_seed(self.subject.seed, str(self.variant), case.name, seed)
        tokens = 17 + 2 * int(torch.randint(8, (1,), generator=generator))
        width = self.layout.vocabulary
        if self.fused:
            width = self.stock.lm_head.in_features
            if self.layout.vocabulary < 1000:  # beyond the chunks of tokens that such a loss is likely to take
                tokens += 600
        given = case.scale * torch.randn(2, tokens, width, generator=generator)
        labels = torch.randint(self.layout.vocabulary, (2, tokens), generator=generator)
        ignored = torch.rand(labels.shape, generator=generator) < 0.33
        return given.to(self.dtype), labels.masked_fill(ignored, case.ignore)

    def run(self, model: Any, case: LossCase, given: Tensor, labels: Tensor, *, call: Any = None) -> dict[str, Tensor]:
        device = self.subject.device
        given = given.detach().to(device).requires_grad_()
        labels = labels.to(device)
        how: dict[str, Any] = {"ignore_index": case.ignore} if case.ignore != -100 else {}
        if case.items:
            how["num_items_in_batch"] = torch.tensor(101, device=device) if case.items == "tensor" else 101
        if case.shifted:
            how["shift_labels"] = labels

        def loss_of(given: Tensor) -> Tensor:
            logits = model.lm_head(given) if self.fused else given
            if case.softcap is not None:
                logits = torch.tanh(logits * MULTIPLIER / case.softcap) * case.softcap
            loss: Tensor = model.loss_function(logits, None if case.shifted else labels, self.layout.vocabulary, **how)
            if isinstance(model.loss_function, FusedLossFunction):
                lazy = isinstance(logits, LazyLogits) and not logits.computed
                require(lazy, "the logits were computed, so that the stock loss stood in for the fused one")
            return loss

        model.zero_grad()
        loss = (loss_of if call is None else call(loss_of))(given)
        loss.backward()
        assert given.grad is not None
        found = {"loss": loss.detach(), "d_hidden" if self.fused else "d_logits": given.grad}
        if self.fused:
            found |= {f"d_{name}": p.grad.clone() for name, p in model.lm_head.named_parameters()}
        return found

    def expected(self, case: LossCase, given: Tensor, labels: Tensor) -> dict[str, Tensor]:
        (raised,) = reference.raise_to_double(given, grad=True)
        leaves = {"d_hidden" if self.fused else "d_logits": raised}
        value = raised
        if self.fused:
            head = self.stock.lm_head
            weight, bias = reference.raise_to_double(head.weight, head.bias, grad=True)
            leaves |= {"d_weight": weight} | ({} if bias is None else {"d_bias": bias})
            value = raised @ weight.T + (0 if bias is None else bias)
        if case.softcap is not None:
            value = case.softcap * torch.tanh(value * MULTIPLIER / case.softcap)
        targets = labels if case.shifted else torch.cat([labels[:, 1:], labels.new_full((2, 1), case.ignore)], dim=1)
        rows = value.reshape(-1, value.shape[-1])
        loss = reference.cross_entropy(rows, targets.reshape(-1), ignore=case.ignore, items=101 if case.items else None)
        torch.autograd.backward(loss)
        return {"loss": loss.detach()} | {name: leaf.grad for name, leaf in leaves.items()}

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


@loss_check("capped")
def capped(bench: LossBench) -> None:
    """Logits that the model scales and caps before the loss."""
    bench.judge(bench.measures_of(CAPPED, ["loss"]))


@loss_check("edge/large_logits")
def large_logits(bench: LossBench) -> None:
    """Where a softmax without its maximum taken off overflows."""
    bench.judge(bench.measures_of(LARGE, ["loss"]))


@training_check("grad/d_logits")
def gradients(bench: LossBench) -> None:
    """The gradient of the logits, or of a fused loss's operands, each way of asking."""
    cases = (MEAN, *ITEMS, IGNORE, SHIFTED, CAPPED, LARGE)
    bench.judge(m for case in cases for m in bench.measures_of(case, bench.gradients, training=True))


@training_check("grad/ignored")
def ignored(bench: LossBench) -> None:
    """Rows whose label does not count have a gradient of exactly zero."""
    logits, labels = bench.draw(SHIFTED, 0)
    name = bench.gradients[0]
    gradient = bench.run(bench.backed(training=True), SHIFTED, logits, labels)[name]
    largest = gradient[(labels == -100).to(gradient.device)].abs().max().item()
    require(largest == 0, f"{name} of labels that do not count is up to {largest:.3g}, not zero")


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
    bench.judge(bench.measures_of(MEAN, ["loss", *bench.gradients], training=True, call=call))


@loss_check("mode/switch")
def switch(bench: LossBench) -> None:
    """To the backend and back to stock: stock computes what it did, bit for bit."""
    model = bench.candidate(frozenset({"training"} if bench.fused else ()))
    logits, labels = bench.draw(MEAN, 0)
    before = bench.run(model, MEAN, logits, labels)
    bench.put_in_place(model)
    bench.run(model, MEAN, logits, labels)
    reset_moe_backend(model)
    after = bench.run(model, MEAN, logits, labels)
    require(
        all(torch.equal(before[n], after[n]) for n in before), "after a reset the stock loss is another than before"
    )
