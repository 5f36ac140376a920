"""Backends that hang, crash, exit or cannot be imported: each is its own cell's error, and the run goes on."""

from __future__ import annotations

import pytest
from hf_moe_conformance.runner import cells_of, run
from hf_moe_conformance.subject import Subject

pytestmark = pytest.mark.usefixtures("mutants_installed")


def results(name: str, timeout: float) -> list[tuple[str, str]]:
    subject = Subject.find("experts", name, dtypes=["float32"])
    wanted = ("edge/no_tokens[float32-default]", "edge/nan_row[float32-default]")
    cells = [c for c in cells_of(subject) if c.name in wanted]
    assert len(cells) == 2
    return [(r.status, r.message) for r in run(subject, cells, timeout=timeout)]


def test_a_right_backend_passes_in_a_worker() -> None:
    assert results("right_experts", 60) == [("pass", ""), ("pass", "")]


def test_a_hang_is_an_error_with_its_stack() -> None:
    found = results("hangs", 3)
    assert [status for status, _ in found] == ["error", "error"]
    for _, message in found:
        assert "no result within 3 s" in message and "mutants.py" in message and "in hangs" in message


def test_a_crash_is_an_error_with_its_stack() -> None:
    found = results("crashes", 60)
    assert [status for status, _ in found] == ["error", "error"]
    assert all("SIGSEGV" in message and "in crashes" in message for _, message in found)


def test_an_exit_is_an_error() -> None:
    assert [(s, m.splitlines()[0]) for s, m in results("exits", 60)] == [("error", "the process exited with 3")] * 2


def test_an_import_error_is_a_failure_that_names_it() -> None:
    found = results("imports_nothing", 60)
    assert [status for status, _ in found] == ["fail", "fail"]
    assert all("No module named 'absent'" in message for _, message in found)
