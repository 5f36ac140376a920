"""Statuses, expected failures, and runs that must not pass for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hf_moe_conformance.check import Bench, Failure, Layout, NotApplicable, Register, require
from hf_moe_conformance.measures import measure
from hf_moe_conformance.result import ExpectedFailure
from hf_moe_conformance.runner import InProcess, cells_of, run
from hf_moe_conformance.subject import Subject
from torch import nn

from hf_moe_backends import selection

toy = Register()


class ToyBench(Bench):
    @classmethod
    def layouts(cls) -> Sequence[Layout]:
        return (Layout(name="here"), Layout(name="elsewhere", missing="this Transformers has none"))

    def candidate(self, needs: frozenset[str]) -> nn.Module:
        raise AssertionError("nothing is refused here")

    def off_by(self, factor: float) -> None:
        reference = torch.linspace(1, 2, 640, dtype=torch.float64).view(10, 64)
        noise = torch.randn(10, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        eager, got = ((reference * (1 + size * 1e-6 * noise)).float() for size in (1, factor))
        self.judge([measure("y", "toy", [got], [eager], [reference])])


def declare(name: str, function: Any, **how: Any) -> None:
    toy(name, kind="experts", bench=ToyBench, **how)(function)


declare("fine", lambda bench: bench.off_by(1))
declare("far", lambda bench: bench.off_by(12))
declare("wrong", lambda bench: require(False, "it is wrong"))
declare("raises", lambda bench: 1 / 0)
declare("exits", lambda bench: exit(3))
declare("device", lambda bench: None, device="cuda")
declare("refuses", lambda bench: (_ for _ in ()).throw(NotApplicable("no such thing")))
declare("unrefusable", lambda bench: require(False, "as it says"), needs={"compile"})
declare("later", lambda bench: None, since="9.0")

SUBJECT = Subject.find("experts", "loop", dtypes=["float32"])
CELLS = {cell.name: cell for cell in toy.cells(SUBJECT)}


def outcome(name: str, expectation: Any = None) -> Any:
    cell = CELLS[f"{name}[float32-here]"]
    return run(SUBJECT, [cell], expectations=None if expectation is None else {cell.name: expectation})[0]


def test_statuses() -> None:
    wanted = {
        "fine": "pass",
        "far": "fail",
        "wrong": "fail",
        "raises": "error",
        "exits": "error",
        "device": "unavailable",
        "refuses": "unsupported",
        "unrefusable": "unsupported",
    }
    assert {name: outcome(name).status for name in wanted} == wanted
    assert outcome("wrong").message == "it is wrong"
    assert "ZeroDivisionError" in outcome("raises").message and __file__ in outcome("raises").message
    assert InProcess(SUBJECT).run(CELLS["fine[float32-elsewhere]"]).status == "unavailable"
    assert outcome("fine").measures and outcome("far").measures


@pytest.mark.parametrize(
    ("name", "expectation", "status"),
    [
        ("wrong", "known", "xfail"),
        ("raises", "known", "xfail"),
        ("fine", "known", "xpass"),
        ("refuses", "known", "xpass"),
        ("device", "known", "unavailable"),
        ("far", ExpectedFailure("known", limit=20.0), "xfail"),
        ("far", ExpectedFailure("known", limit=8.0), "fail"),
        ("wrong", ExpectedFailure("known", limit=100.0), "fail"),
        ("raises", ExpectedFailure("known", limit=100.0), "error"),
        ("fine", ExpectedFailure("known", limit=100.0), "xpass"),
    ],
)
def test_expected_failures_are_strict(name: str, expectation: Any, status: str) -> None:
    found = outcome(name, expectation)
    assert found.status == status
    assert "known" in found.message or status in ("fail", "error", "unavailable")


def test_an_expected_failure_carries_its_issue() -> None:
    expectation = ExpectedFailure("known", issue="https://example.org/12")
    assert "known (https://example.org/12)" in outcome("wrong", expectation).message


def test_patterns_stand_for_any_text() -> None:
    cells = list(CELLS.values())
    found = run(SUBJECT, [c for c in cells if c.check.name == "wrong"], expectations={"wrong[*-here]": "known"})
    assert [r.status for r in found] == ["xfail", "unavailable"]
    with pytest.raises(ValueError, match=r"'wrong\[bfloat16-\*\]' names no cell"):
        run(SUBJECT, cells, expectations={"wrong[bfloat16-*]": "known"})


def test_a_run_of_nothing_raises() -> None:
    with pytest.raises(ValueError, match="nothing would be run"):
        run(SUBJECT, [])
    with pytest.raises(ValueError, match="no experts check matching 'absent'"):
        cells_of(SUBJECT, matching="absent")


def test_checks_of_a_later_suite_can_be_left_out() -> None:
    names = {cell.check.name for cell in toy.cells(SUBJECT, as_of="1.0")}
    assert "later" not in names and "fine" in names
    assert "later" in {cell.check.name for cell in toy.cells(SUBJECT)}


def test_a_check_that_measures_nothing_is_an_error() -> None:
    bench = ToyBench(SUBJECT, CELLS["fine[float32-here]"].variant)
    with pytest.raises(ValueError, match="measured nothing"):
        bench.judge([])


def test_two_checks_of_one_name_raise() -> None:
    with pytest.raises(ValueError, match="two experts checks 'fine'"):
        toy("fine", kind="experts", bench=ToyBench)


def test_float32_is_always_among_the_dtypes() -> None:
    assert Subject.find("experts", "loop", dtypes=["bfloat16"]).dtypes == ("float32", "bfloat16")
    with pytest.raises(ValueError, match="float64"):
        Subject.find("experts", "loop", dtypes=["float64"])


# Capabilities that are not claimed.


def restricted(**claims: Any) -> Subject:
    """`loop`, claiming less."""
    spec = SUBJECT.spec
    return replace(SUBJECT, spec=replace(spec, capabilities=replace(spec.capabilities, **claims)))


def test_what_is_not_claimed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_moe_backends import registry

    subject = restricted(features=frozenset({"transposed"}), training=False, gates=frozenset({"swiglu"}))
    known = registry.registry()
    (plugin,) = (p for p in known.plugins if any(s.name == "loop" for s in p.specs))
    specs = tuple(subject.spec if s.name == "loop" else s for s in plugin.specs)
    monkeypatch.setattr(registry, "_registry", registry.Registry([replace(plugin, specs=specs)]))
    here = InProcess(subject)
    cells = {c.name: c for c in cells_of(subject)}
    wanted = {
        "forward[float32-default]": "pass",
        "forward[float32-interleaved]": "unsupported",
        "forward[float32-ungated]": "unsupported",
        "forward[float32-clamped]": "unsupported",
        "grad/dX[float32-default]": "unsupported",
        "sentinels/forward[float32-default]": "unsupported",
    }
    results = {name: here.run(cells[name]) for name in wanted}
    assert {name: r.status for name, r in results.items()} == wanted
    assert "biases" in results["forward[float32-interleaved]"].message
    assert "no backward pass" in results["grad/dX[float32-default]"].message
    assert "sentinels" in results["sentinels/forward[float32-default]"].message

    # and a core that does not ask is caught
    monkeypatch.setattr(selection, "_demand_refusal", lambda *args: None)
    found = here.run(cells["forward[float32-interleaved]"])
    assert found.status == "fail" and "was not refused" in found.message


def test_what_is_claimed_must_not_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_demand_refusal", lambda *args: "it is Tuesday")
    subject = SUBJECT
    cell = next(c for c in cells_of(subject) if c.name == "forward[float32-default]")
    found = InProcess(subject).run(cell)
    assert found.status == "fail" and "it is Tuesday" in found.message


def test_failures_read_well() -> None:
    assert str(Failure(["one", "two"])) == "one\ntwo"
