"""The README's tables are those of the committed reports, and no stock failure is in them without an explanation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import result_tables
from hf_moe_conformance.report import Report
from hf_moe_conformance.result import Result
from hf_moe_conformance.subject import Subject
from result_tables import Known, Unexplained, calibration, generate, stock
from test_report import result

KNOWN = (Known(backend="experts=grouped_mm", checks="forward", said="it said", why="of its bug"),)


def report(*results: Result, name: str = "grouped_mm") -> Report:
    return Report.of(Subject.find("experts", name, seed=1), ["inference"], results)


def far(**how: Any) -> Result:
    found = result("fail", 12.0, **how)
    return replace(found, measures=(replace(found.measures[0], error_limit=3.0),))


def test_the_tables_in_the_readme_are_current() -> None:
    assert generate() == result_tables.README.read_text(), "run `python tests/result_tables.py`"


def test_a_failure_that_nobody_has_explained_raises() -> None:
    with pytest.raises(Unexplained, match=r"forward\[float32-default\]: <what> it said"):
        stock([report(far())], known=())
    other = replace(KNOWN[0], versions=("5.0.0",))
    with pytest.raises(Unexplained):
        stock([report(far())], known=[other])
    # of others' backends nothing need be explained
    with pytest.raises(ValueError, match="no reports of stock"):
        stock([report(far(), name="loop")], known=())


def test_an_explanation_of_nothing_raises() -> None:
    with pytest.raises(ValueError, match="nothing fails for this any more"):
        stock([report(result())], known=KNOWN)


def test_cells_of_one_reason_share_a_row() -> None:
    table = stock([report(far(), far(layout="bias"), result(layout="ungated"), far(dtype="bfloat16"))], known=KNOWN)
    row = table.splitlines()[2]
    assert "`forward` (float32: default, bias; bfloat16: every layout)" in row
    assert "rms error 12, limit 3" in row and "of its bug" in row and "| CPU |" in row
    error = replace(result("error"), message="KeyError: it said this at torch/a.py:1", measures=())
    assert "`KeyError: it said this`" in stock([report(error)], known=KNOWN)


def test_calibrations_are_joined() -> None:
    text = "torch 2, here\n\n| backend | device |\n|---|---|\n| `{}` | cpu |\n\nLimits: {}\n"
    assert calibration([text.format("a", 3), text.format("b", 3)]).count("| cpu |") == 2
    with pytest.raises(ValueError, match="different versions"):
        calibration([text.format("a", 3), text.format("b", 4)])
