"""The suite is tested: every wrong backend fails the cells named for it, and every check catches one."""

from __future__ import annotations

from functools import cache

import kill_matrix
import pytest
import torch
import torch.nn.functional as F
from dispatcher_mutants import DISPATCHER_MUTANTS
from hf_moe_conformance.check import Cell, check
from hf_moe_conformance.runner import InProcess, cells_of
from hf_moe_conformance.subject import Subject
from mutants import MUTANTS, Mutant

ALL = MUTANTS + DISPATCHER_MUTANTS  # `test_dispatcher.py` runs the latter

pytestmark = pytest.mark.usefixtures("mutants_installed")


@pytest.fixture(autouse=True)
def _torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "cross_entropy", F.cross_entropy)  # one mutant replaces it


def subject(kind: str, name: str, device: str = "cpu") -> Subject:
    return Subject.find(kind, name, device=device)  # type: ignore[arg-type]


@cache
def cells(kind: str) -> dict[str, Cell]:
    return {cell.name: cell for cell in cells_of(subject(kind, f"right_{kind}"))}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.full_name)
def test_a_wrong_backend_is_caught(mutant: Mutant) -> None:
    assert survived(mutant, mutant.kills, "cpu") == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.on_gpu], ids=lambda m: m.full_name)
def test_a_wrong_backend_is_caught_on_a_gpu(mutant: Mutant) -> None:
    assert survived(mutant, mutant.on_gpu, "cuda") == []


def survived(mutant: Mutant, kills: tuple[str, ...], device: str) -> list[str]:
    """What should have failed and did not."""
    here = InProcess(subject(mutant.kind, mutant.name, device))
    found = []
    for name in kills:
        cell = cells(mutant.kind)[name]
        if cell.variant.layout.missing:
            continue
        result = here.run(cell)
        if result.status not in ("fail", "error"):
            found.append(f"{name}: {result.status} {result.message} {result.measures}")
    return found


@pytest.mark.parametrize("kind", ["experts", "attn", "linear", "norm", "loss"])
def test_the_same_without_its_bug_passes(kind: str) -> None:
    """Otherwise a mutant could be caught for something else than its bug."""
    here = InProcess(subject(kind, f"right_{kind}"))
    named = sorted({name for m in MUTANTS if m.kind == kind for name in m.kills})
    for name in named:
        result = here.run(cells(kind)[name])
        assert result.status in ("pass", "unavailable"), f"{name}: {result.message}"


def test_every_check_catches_one() -> None:
    killing = {(m.kind, name.split("[")[0]) for m in ALL for name in m.kills + m.on_gpu}
    cells("experts")  # declares the checks
    assert {(c.kind, c.name) for c in check.checks} - killing == set()


def test_kills_name_cells() -> None:
    unknown = [(m.full_name, name) for m in ALL for name in m.kills + m.on_gpu if name not in cells(m.kind)]
    assert not unknown


def test_the_table_in_the_readme_is_current() -> None:
    assert kill_matrix.in_readme() == kill_matrix.render(), "run `python tests/kill_matrix.py`"
