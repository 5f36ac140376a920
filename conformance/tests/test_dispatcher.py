"""Worlds of ranks, wrong dispatchers, and what is said of a rank that hangs, dies, raises or refuses."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dispatcher_mutants import DISPATCHER_MUTANTS
from hf_moe_conformance import ranks
from hf_moe_conformance.checks.dispatcher_bench import parallel_layouts
from hf_moe_conformance.ranks import RankError, World, world
from hf_moe_conformance.result import Result
from hf_moe_conformance.runner import InProcess, run
from hf_moe_conformance.subject import Subject
from mutants import Mutant
from test_mutants import cells, subject, survived

pytestmark = pytest.mark.usefixtures("mutants_installed", "_shorter")

needs_dispatchers = pytest.mark.skipif(
    any(layout.missing for layout in parallel_layouts()), reason="this Transformers cannot set a dispatcher"
)


@pytest.fixture
def _shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "DEADLINE", 30.0)
    monkeypatch.setattr(ranks, "LAG", 6.0)


# Worlds. The functions are run on the ranks, which import this module.


def product(factor: int, tensor: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(tensor)
    return tensor * factor


def one(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "raises":
            raise ValueError("of its own")
        if how == "exits":
            os._exit(7)
        time.sleep(1000)
    dist.barrier()


def test_a_world_runs_functions_and_stays() -> None:
    here = world("cpu", 2)
    for factor in (2, 3):
        found = here.run(product, [(factor, torch.ones(2)), (-factor, torch.full((2,), 4.0))])
        assert [t.tolist() for t in found] == [[5.0 * factor] * 2, [-5.0 * factor] * 2]
    assert world("cpu", 2) is here


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", ("rank 1 of 2 raised", "ValueError: of its own")),
        ("exits", ("rank 1 of 2 died", "exited with 7")),
        ("hangs", ("rank 1 of 2 hung", "test_dispatcher.py", "in one")),
    ],
)
def test_a_rank_that_does_not_return_ends_its_world(how: str, said: tuple[str, ...], monkeypatch: Any) -> None:
    monkeypatch.setattr(ranks, "DEADLINE", 4.0)
    here = World("cpu", 2)
    pids = [process.pid for process in here._processes]
    start = time.monotonic()
    with pytest.raises(RankError) as error:
        here.run(one, [(how,), (how,)])
    assert time.monotonic() - start < 15
    # the rank that went first comes first
    assert str(error.value).startswith(said[0]) or how == "hangs"
    assert all(text in str(error.value) for text in said)
    assert not here.alive
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert world("cpu", 2).alive


PARENT = """
import os
from hf_moe_conformance.ranks import World
if __name__ == "__main__":
    here = World("cpu", 2)
    print(*(process.pid for process in here._processes), flush=True)
    os._exit(1)
"""


@pytest.mark.slow
def test_ranks_do_not_outlive_their_parent(tmp_path: Path) -> None:
    """A worker that hangs is ended by its watchdog, which runs no `atexit`."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    done = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, text=True, timeout=120)
    pids = [int(pid) for pid in done.stdout.split()]
    assert done.returncode == 1 and len(pids) == 2
    end = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end, "the ranks are still there"
        time.sleep(0.2)


# Dispatchers. The first cell of each is run always, the others by `-m slow`.

HANGS = "waits_for_peers"  # so that its first cell takes the whole deadline


def outcome(name: str, cell: str, **how: Any) -> Result:
    """Of one cell, in this process."""
    return InProcess(Subject.find("dispatcher", name, **how)).run(cells("dispatcher")[cell])


@needs_dispatchers
@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, marks=pytest.mark.slow) if m.name == HANGS else m for m in DISPATCHER_MUTANTS],
    ids=lambda m: m.name,
)
def test_a_wrong_dispatcher_is_caught(mutant: Mutant) -> None:
    assert survived(mutant, mutant.kills[:1], "cpu") == []


def test_every_check_is_among_the_first_cells() -> None:
    first = {m.kills[0].split("[")[0] for m in DISPATCHER_MUTANTS if m.name != HANGS}
    assert {cell.check.name for cell in cells("dispatcher").values()} == first


@needs_dispatchers
@pytest.mark.slow
@pytest.mark.parametrize("mutant", DISPATCHER_MUTANTS, ids=lambda m: m.name)
def test_a_wrong_dispatcher_is_caught_elsewhere(mutant: Mutant) -> None:
    assert survived(mutant, mutant.kills[1:], "cpu") == []


@needs_dispatchers
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["first", "every"])
def test_the_same_without_its_bug_passes(every: bool) -> None:
    named = {name for m in DISPATCHER_MUTANTS for name in (m.kills if every else m.kills[:1])}
    here = InProcess(subject("dispatcher", "right_dispatcher"))
    for name, cell in cells("dispatcher").items():  # in order, so that cells share a bench
        if name in named:
            result = here.run(cell)
            assert result.status == "pass", f"{name}: {result.message}"


@needs_dispatchers
@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("rank_hangs", "error", ("rank 1 of 2 hung", "dispatcher_mutants.py", "in run_experts")),
        ("rank_crashes", "error", ("rank 1 of 2 died", "SIGSEGV", "in run_experts")),
        ("rank_raises", "error", ("rank 1 of 2 raised", "ZeroDivisionError: of its own")),
        ("rank_refuses", "fail", ("cannot be set: rank 1 failed", "has no NVLink")),
        ("refuses", "unsupported", ("no rank has NVLink",)),
        ("constructor_fails", "fail", ("cannot be set", "AttributeError: a bug")),
    ],
)
def test_what_is_said(name: str, status: str, said: tuple[str, ...], monkeypatch: Any) -> None:
    monkeypatch.setattr(ranks, "DEADLINE", 8.0)
    result = outcome(name, "forward[float32-ep2]")
    assert result.status == status, result.message
    assert all(text in result.message for text in said), result.message


@needs_dispatchers
def test_what_is_not_claimed_must_be_refused() -> None:
    for name, cell, said in (
        ("inference_only", "grad/dX[float32-ep2]", "no backward pass"),
        ("float32_only", "forward[bfloat16-ep2]", "not in bfloat16"),
    ):
        result = outcome(name, cell)
        assert result.status == "unsupported" and said in result.message
    assert outcome("inference_only", "forward[float32-ep2]").status == "pass"
    # stock says no by a ValueError of its constructor
    result = outcome("all_reduce", "forward[float32-ep2]")
    assert result.status == "unsupported" and "to hold the same batch" in result.message
    assert outcome("all_reduce", "forward[float32-tp2_ep2_bias]").status == "pass"


@needs_dispatchers
def test_cells_run_in_a_worker() -> None:
    found = subject("dispatcher", "right_dispatcher")
    wanted = [cells("dispatcher")[name] for name in ("edge/no_tokens[float32-ep2]", "exception/forward[float32-ep2]")]
    assert [(r.status, r.message) for r in run(found, wanted, timeout=100)] == [("pass", "")] * 2


def test_too_few_gpus_are_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    result = outcome("right_dispatcher", "forward[float32-ep4]", device="cuda")
    assert result.status == "unavailable" and "takes 4 GPUs, this machine has 2" in result.message
