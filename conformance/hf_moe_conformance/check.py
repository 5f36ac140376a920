"""Checks, and the cells that they make: one check on one dtype and one layout.

A check is a plain function of a bench. The bench holds the subject's modules and inputs for one dtype and layout, and
whatever is expensive to make of them, so that the checks of one variant share it. A check returns when all is well and
raises `Failure` otherwise; whatever else it raises is an error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from packaging.version import Version
from torch import nn

from hf_moe_backends import BackendUnavailable, MoeBackendError, PlanError
from hf_moe_backends.spec import Kind
from hf_moe_conformance.measures import Measure
from hf_moe_conformance.subject import Subject

Tier = Literal["inference", "training", "ep"]
TIERS: tuple[Tier, ...] = ("inference", "training", "ep")

CLAIMS = frozenset({"training", "compile", "autocast", "deterministic", "no_host_sync"})
"""What a check may need besides features: fields of `Capabilities`. Of these only training can be refused."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a subject is run on: a way of storing weights, a formula, a family.

    Attributes:
        features: of `spec.FEATURES`, what a backend must claim to serve it.
        gate: the gate's formula, for experts backends that fuse gates.
        missing: why this Transformers cannot make it, or None.
        ranks: how many processes it takes, each with a device of its own.
    """

    name: str
    features: frozenset[str] = frozenset()
    gate: str | None = None
    missing: str | None = None
    ranks: int = 1


@dataclass(frozen=True)
class Variant:
    """One dtype and one layout."""

    dtype: str
    layout: Layout

    def __str__(self) -> str:
        return f"{self.dtype}-{self.layout.name}"

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


class Failure(AssertionError):
    """The subject is wrong.

    Args:
        problems: what is wrong, one sentence each.
        measures: those whose error alone is outside its limit, when there is nothing else among the problems. An
            expected failure may widen that limit.
    """

    def __init__(self, problems: Sequence[str], measures: Sequence[Measure] = ()):
        super().__init__("\n".join(problems))
        self.measures = tuple(measures)


class Bench(ABC):
    """The subject on one variant."""

    def __init__(self, subject: Subject, variant: Variant):
        self.subject, self.variant = subject, variant
        self.measures: list[Measure] = []

    @classmethod
    @abstractmethod
    def layouts(cls) -> Sequence[Layout]:
        """All that there are, those that this Transformers lacks included."""

    def candidate(self, needs: frozenset[str]) -> nn.Module:
        """A stock model that demands the variant and `needs` of a backend, for it to be refused."""
        raise NotImplementedError  # by a bench whose models are in other processes: see `refusal`

    def refusal(self, needs: frozenset[str]) -> str | None:
        """What the backend says when it is set on a model that demands the variant and `needs`. None: it is set."""
        return self.refused(self.candidate(needs))

    def refused(self, model: nn.Module) -> str | None:
        """What the backend says when it is set on this model. None: it is set."""
        try:
            self.subject.apply(model)
        except (BackendUnavailable, PlanError) as refusal:
            return str(refusal)
        return None

    def put_in_place(self, model: nn.Module) -> None:
        """Set the backend on a model that its claims cover.

        Raises:
            Failure: it was refused.
        """
        try:
            self.subject.apply(model)
        except MoeBackendError as refusal:
            raise Failure([f"it claims to serve this and was refused: {refusal}"]) from refusal

    def judge(self, measures: Iterable[Measure]) -> None:
        """Record what was measured.

        Raises:
            Failure: some of it is outside the limits.
        """
        found = list(measures)
        if not found:
            raise ValueError("a check measured nothing")
        self.measures.extend(found)
        problems = [problem for m in found for problem in m.problems]
        if problems:
            raise Failure(problems, [m for m in found if m.problems])


class NotApplicable(Exception):
    """The subject has no part in this, or says no to it, as the message tells. The cell is unsupported."""


def require(holds: bool, problem: str) -> None:
    """Raise `Failure` unless it holds."""
    if not holds:
        raise Failure([problem])


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check as it was declared.

    Attributes:
        since: the version of the suite that it came with.
        needs: features and claims beyond the layout's own that a backend must declare. Without them the check asks for
            a refusal instead.
        device: the only device it means anything on, or None.
        dtypes, layouts: where it is drawn, None for all.
    """

    name: str
    kind: Kind
    tier: Tier
    since: str
    run: Callable[[Any], None]
    bench: type[Bench]
    needs: frozenset[str]
    device: str | None
    dtypes: frozenset[str] | None
    layouts: frozenset[str] | None

    def __post_init__(self) -> None:
        Version(self.since)  # raises here, where it was written


@dataclass(frozen=True)
class Cell:
    """One check on one variant. Its name is what reports and expected failures call it."""

    check: Check
    variant: Variant

    @property
    def name(self) -> str:
        return f"{self.check.name}[{self.variant}]"


class Register:
    """The checks of all kinds, in the order in which they were declared."""

    def __init__(self) -> None:
        self.checks: list[Check] = []

    def __call__(
        self,
        name: str,
        *,
        kind: Kind,
        bench: type[Bench],
        tier: Tier = "inference",
        since: str = "1.0",
        needs: Iterable[str] = (),
        device: str | None = None,
        dtypes: Iterable[str] | None = None,
        layouts: Iterable[str] | None = None,
    ) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
        """Declare a function as a check.

        Raises:
            ValueError: a name that this kind already has.
        """
        if any(c.name == name and c.kind == kind for c in self.checks):
            raise ValueError(f"there are two {kind} checks {name!r}")
        needed = frozenset(needs) | ({"training"} if tier == "training" else set())

        def declare(run: Callable[[Any], None]) -> Callable[[Any], None]:
            self.checks.append(
                Check(
                    name=name,
                    kind=kind,
                    tier=tier,
                    since=since,
                    run=run,
                    bench=bench,
                    needs=needed,
                    device=device,
                    dtypes=None if dtypes is None else frozenset(dtypes),
                    layouts=None if layouts is None else frozenset(layouts),
                )
            )
            return run

        return declare

    def cells(self, subject: Subject, *, tiers: Iterable[Tier] = TIERS, as_of: str | None = None) -> list[Cell]:
        """Every cell of a subject, grouped by bench and variant so that they can share what those hold.

        Args:
            as_of: leave out checks that came with a later version of the suite than this.
        """
        wanted = set(tiers)
        checks = [
            c
            for c in self.checks
            if c.kind == subject.kind and c.tier in wanted and (as_of is None or Version(c.since) <= Version(as_of))
        ]
        found = []
        for bench in dict.fromkeys(c.bench for c in checks):
            for layout in bench.layouts():
                for dtype in subject.dtypes:
                    variant = Variant(dtype, layout)
                    found += [Cell(c, variant) for c in checks if c.bench is bench and _drawn(c, variant)]
        return found


def _drawn(check: Check, variant: Variant) -> bool:
    return (check.dtypes is None or variant.dtype in check.dtypes) and (
        check.layouts is None or variant.layout.name in check.layouts
    )


check = Register()
"""The register that `hf_moe_conformance.checks` fills."""
