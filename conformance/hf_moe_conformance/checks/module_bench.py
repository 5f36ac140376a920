"""The bench of backends that replace one module: linear layers and norms."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_backends import reset_moe_backend
from hf_moe_backends.spec import Kind
from hf_moe_conformance.cases import draw_seed
from hf_moe_conformance.check import Bench, Layout, Variant, check, require
from hf_moe_conformance.measures import Measure, measure
from hf_moe_conformance.subject import Subject

SEEDS = 3
Tensors = dict[str, "Tensor | None"]


@dataclass(frozen=True, kw_only=True)
class ModuleLayout(Layout):
    """One kind of module.

    Attributes:
        build: a stock module, with any weights.
        formula: the reference, of the input and the module's parameters by name.
        width: of the input's last dimension.
    """

    build: Callable[[], nn.Module] = field(repr=False)
    formula: Callable[[Tensor, dict[str, Tensor]], Tensor] = field(repr=False)
    width: int


@dataclass(frozen=True, kw_only=True)
class ModuleCase:
    """Leading dimensions, and the scale of the input."""

    name: str
    lead: tuple[int, ...]
    scale: float = 1.0


CASES = (
    ModuleCase(name="2-d", lead=(33,)),
    ModuleCase(name="3-d", lead=(2, 17)),
    ModuleCase(name="one row", lead=(1,)),
    ModuleCase(name="large", lead=(1537,)),
)
BATCH = CASES[1]


class ModuleBench(Bench):
    """One backend on a module inside a holder, as it is inside a model."""

    layout: ModuleLayout

    def __init__(self, subject: Subject, variant: Variant):
        super().__init__(subject, variant)
        assert isinstance(variant.layout, ModuleLayout)
        self.layout, self.dtype = variant.layout, variant.torch_dtype
        self._stock: dict[int, nn.Module] = {}
        self._backed: dict[tuple[int, bool], nn.Module] = {}

    def candidate(self, needs: frozenset[str]) -> nn.Module:
        return copy.deepcopy(self.stock(0)).train("training" in needs)

    def stock(self, seed: int) -> nn.Module:
        """A holder with the stock module as its only child."""
        if seed not in self._stock:
            module = self.layout.build()
            with torch.no_grad():
                for name, parameter in module.named_parameters():
                    generator = draw_seed(self.subject.seed, self.layout.name, name, seed)
                    values = torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(values / self.layout.width**0.5 if values.ndim == 2 else 0.5 * values + 1)
            holder = nn.ModuleDict({"it": module})
            self._stock[seed] = holder.to(self.dtype).to(self.subject.device).eval()
        return self._stock[seed]

    def backed(self, seed: int, *, training: bool) -> nn.Module:
        key = (seed, training)
        if key not in self._backed:
            holder = copy.deepcopy(self.stock(seed)).train(training)
            self.put_in_place(holder)
            self._backed[key] = holder
        return self._backed[key]

    def inputs(self, case: ModuleCase, seed: int) -> Tensor:
        generator = draw_seed(self.subject.seed, str(self.variant), case.name, seed)
        return (case.scale * torch.randn(*case.lead, self.layout.width, generator=generator)).to(self.dtype)

    def run(self, holder: nn.Module, x: Tensor, *, backward: bool, call: Any = None) -> Tensors:
        """`y`, and with `backward` `dX` and the gradient of each parameter, under a cotangent that x's values seed."""
        module: Any = holder["it"]  # type: ignore[index]
        x = x.detach().to(self.subject.device).requires_grad_(backward)
        holder.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(backward):
            y = call(module, x) if call else module(x)
        found: Tensors = {"y": y.detach()}
        if backward:
            y.backward(self.cotangent(y).to(y))
            found |= {"dX": x.grad} | {f"d_{name}": p.grad for name, p in module.named_parameters()}
            holder.zero_grad(set_to_none=True)
        return found

    def reference(self, holder: nn.Module, x: Tensor, *, backward: bool) -> Tensors:
        module: Any = holder["it"]  # type: ignore[index]
        raised = {n: p.detach().cpu().double().requires_grad_(backward) for n, p in module.named_parameters()}
        x = x.detach().double().requires_grad_(backward)
        with torch.set_grad_enabled(backward):
            y = self.layout.formula(x, raised)
        found: Tensors = {"y": y.detach()}
        if backward:
            torch.autograd.backward(y, self.cotangent(y).to(self.dtype).double())
            found |= {"dX": x.grad} | {f"d_{name}": leaf.grad for name, leaf in raised.items()}
        return found

    def cotangent(self, y: Tensor) -> Tensor:
        return torch.randn(y.shape, generator=draw_seed(self.subject.seed, "cotangent", tuple(y.shape))).to(self.dtype)

    def measures_of(
        self, case: ModuleCase, names: Sequence[str], *, backward: bool, call: Any = None, eager_call: Any = None
    ) -> list[Measure]:
        """Compare tensors of one case over `SEEDS` draws.

        Args:
            call, eager_call: `call(module, x)` in the place of calling the backend's module, and the stock one.
        """
        runs = []
        for seed in range(SEEDS):
            x, stock = self.inputs(case, seed), self.stock(seed)
            runs.append(
                (
                    self.run(self.backed(seed, training=backward), x, backward=backward, call=call),
                    self.run(stock, x, backward=backward, call=eager_call),
                    self.reference(stock, x, backward=backward),
                )
            )
        return [self._measure(name, case.name, runs) for name in names]

    def _measure(self, name: str, case: str, runs: Sequence[tuple[Tensors, Tensors, Tensors]]) -> Measure:
        triples = []
        for found in runs:
            ours, theirs, wanted = (tensors[name] for tensors in found)
            require(ours is not None, f"{name} ({case}): there is no gradient")
            assert ours is not None and theirs is not None and wanted is not None
            require(ours.dtype == theirs.dtype, f"{name} ({case}) is {ours.dtype}, that of eager is {theirs.dtype}")
            triples.append((ours, theirs, wanted))
        got, eager, expected = zip(*triples, strict=True)
        return measure(name, case, got, eager, expected)


def declare(kind: Kind, bench: type[ModuleBench], gradients: dict[str, tuple[str, ...]]) -> None:
    """Declare the checks that linear layers and norms have in common.

    Args:
        gradients: of parameters, `d_weight` and so on, and the layouts that have them.
    """
    declared = partial(check, kind=kind, bench=bench)
    training = partial(declared, tier="training")

    @declared("forward")
    def forward(bench: ModuleBench) -> None:
        """Any number of leading dimensions, few rows and many."""
        bench.judge(m for case in CASES for m in bench.measures_of(case, ["y"], backward=False))

    def gradient(tensor: str, bench: ModuleBench) -> None:
        bench.judge(m for case in CASES for m in bench.measures_of(case, [tensor], backward=True))

    training("grad/dX")(partial(gradient, "dX"))
    for tensor, layouts in gradients.items():
        training(f"grad/{tensor}", layouts=layouts)(partial(gradient, tensor))

    @training("edge/no_rows")
    def no_rows(bench: ModuleBench) -> None:
        """No rows give no rows, connected to autograd."""
        x = bench.inputs(replace(BATCH, lead=(0,)), 0)
        got = bench.run(bench.backed(0, training=True), x, backward=True)
        y, dx = got["y"], got["dX"]
        expected = bench.run(bench.stock(0), x, backward=False)["y"]
        assert y is not None and expected is not None
        require(y.shape == expected.shape, f"no rows give {tuple(y.shape)}, expected {tuple(expected.shape)}")
        require(dx is not None and dx.shape == x.shape, "no rows give no dX")

    @declared("edge/strided")
    def strided(bench: ModuleBench) -> None:
        """An input that is a view with other strides."""

        def view(module: Any, x: Tensor) -> Tensor:
            y: Tensor = module(x.transpose(0, 1).contiguous().transpose(0, 1))
            return y

        bench.judge(bench.measures_of(BATCH, ["y"], backward=False, call=view))

    @declared("edge/scales")
    def scales(bench: ModuleBench) -> None:
        """Inputs far from unit scale; a norm's eps shows at the small end."""
        cases = [replace(BATCH, name=f"x{scale:g}", scale=scale) for scale in (1e-4, 1e3)]
        bench.judge(m for case in cases for m in bench.measures_of(case, ["y"], backward=False))

    @declared("mode/repeat", needs={"deterministic"})
    def repeat(bench: ModuleBench) -> None:
        """The same call gives the same bits."""
        x = bench.inputs(CASES[-1], 0)
        runs = [bench.run(bench.backed(0, training=False), x, backward=False)["y"] for _ in range(4)]
        first = runs[0]
        require(
            all(y is not None and first is not None and torch.equal(y, first) for y in runs), "y differs between calls"
        )

    @training("mode/compile", needs={"compile"})
    def compiled(bench: ModuleBench) -> None:
        """`torch.compile(fullgraph=True)`, forward and backward."""
        torch._dynamo.reset()
        backend = "inductor" if bench.subject.device == "cuda" else "aot_eager"

        def call(module: Any, x: Tensor) -> Tensor:
            whole: Callable[[Tensor], Tensor] = torch.compile(module, fullgraph=True, backend=backend)
            return whole(x)

        bench.judge(bench.measures_of(BATCH, ["y", "dX"], backward=True, call=call))

    @declared("mode/switch")
    def switch(bench: ModuleBench) -> None:
        """To the backend and back to stock: stock computes what it did, on the same Parameter objects."""
        holder, x = copy.deepcopy(bench.stock(0)), bench.inputs(BATCH, 0)
        before, parameters = bench.run(holder, x, backward=False)["y"], dict(holder.named_parameters())
        keys = holder.state_dict().keys()
        bench.put_in_place(holder)
        same = dict(holder.named_parameters())
        require(
            same.keys() == parameters.keys() and all(same[n] is p for n, p in parameters.items()),
            "the backend's module does not hold the same Parameter objects under the same names",
        )
        require(holder.state_dict().keys() == keys, "the backend's module has other state-dict keys")
        bench.run(holder, x, backward=False)
        reset_moe_backend(holder)
        after = bench.run(holder, x, backward=False)["y"]
        assert before is not None and after is not None
        require(torch.equal(before, after), "after a reset the stock module computes something else than before")

    @declared("mode/copied")
    def copied(bench: ModuleBench) -> None:
        """A deep copy runs its own weights and not the original's."""
        holder, other, x = copy.deepcopy(bench.stock(0)), bench.stock(1), bench.inputs(BATCH, 1)
        bench.put_in_place(holder)
        double = copy.deepcopy(holder)
        if not list(double.parameters()):
            return  # without weights there is nothing to mistake
        with torch.no_grad():
            for parameter, new in zip(double.parameters(), other.parameters(), strict=True):
                parameter.copy_(new)
        run = partial(bench.run, x=x, backward=False)
        expected = bench.reference(other, x, backward=False)
        bench.judge([bench._measure("y", "deep copy", [(run(double), run(other), expected)])])
