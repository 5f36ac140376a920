"""Reports on disk, the matrix, and the command."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from hf_moe_conformance import matrix, measures
from hf_moe_conformance.cli import app
from hf_moe_conformance.measures import Measure
from hf_moe_conformance.report import Report
from hf_moe_conformance.result import Result, Status, load_expectations
from hf_moe_conformance.subject import Subject
from typer.testing import CliRunner

SUBJECT = Subject.find("experts", "loop", seed=7)


def result(status: Status = "pass", error: float = 1.25, layout: str = "default", dtype: str = "float32") -> Result:
    found = Measure(
        tensor="y",
        case="a",
        error=error,
        error_limit=3.0,
        gain=0.0,
        gain_limit=1.0,
        worst_row=1.0,
        worst_row_limit=5.0,
        rms=1e-7,
        eager_rms=1e-7,
        elements=9,
    )
    return Result(
        cell=f"forward[{dtype}-{layout}]",
        check="forward",
        tier="inference",
        dtype=dtype,
        layout=layout,
        status=status,
        message="<what> it said",
        measures=(found,),
    )


def report(*results: Result) -> Report:
    return Report.of(SUBJECT, ["inference"], results)


def test_a_report_comes_back_as_it_was(tmp_path: Path) -> None:
    before = report(result(), result("fail", math.inf, "bias"), result("fail", math.nan, "ungated"))
    before.save(tmp_path / "r.json")
    after = Report.load(tmp_path / "r.json")
    assert repr(after) == repr(before)  # NaN is not equal to itself
    values = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)  # strict JSON
    assert values["seed"] == 7 and values["subject"]["name"] == "loop" and values["versions"]["contract"]
    before.save(tmp_path / "r.json.gz")
    assert repr(Report.load(tmp_path / "r.json.gz")) == repr(before)
    assert (tmp_path / "r.json.gz").stat().st_size < (tmp_path / "r.json").stat().st_size


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}'])
def test_what_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ValueError, match="is no report"):
        Report.load(tmp_path / "r.json")
    (tmp_path / "r.json.gz").write_text(text)
    with pytest.raises(ValueError, match="is no report"):
        Report.load(tmp_path / "r.json.gz")


@pytest.mark.parametrize(
    ("statuses", "failed"),
    [
        (["pass"], False),
        (["pass", "xfail", "unsupported", "unavailable"], False),
        (["pass", "fail"], True),
        (["pass", "error"], True),
        (["pass", "xpass"], True),
    ],
)
def test_when_a_run_fails(statuses: list[Status], failed: bool) -> None:
    results = [result(status, layout=str(i)) for i, status in enumerate(statuses)]
    assert report(*results).failed is failed and not report(*results).empty


@pytest.mark.parametrize("statuses", [["unavailable"], ["unsupported"], ["unavailable", "unsupported"]])
def test_a_run_in_which_nothing_passed_or_failed_is_a_run_of_nothing(tmp_path: Path, statuses: list[Status]) -> None:
    found = report(*[result(status, layout=str(i)) for i, status in enumerate(statuses)])
    assert found.empty
    found.save(tmp_path / "nothing.json")
    done = CliRunner().invoke(app, ["matrix", str(tmp_path / "nothing.json")])
    assert done.exit_code == 2 and "no cell passed or failed" in done.output
    report(result("fail")).save(tmp_path / "failed.json")
    assert CliRunner().invoke(app, ["matrix", *map(str, sorted(tmp_path.iterdir()))]).exit_code == 1


def test_a_report_of_nothing_raises() -> None:
    with pytest.raises(ValueError, match="no results"):
        report()


class Page(HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.cells: list[tuple[str, str]] = []
        self._cell: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.links += [v for k, v in found.items() if k in ("src", "href") and v]
        self._cell = found.get("class") if tag == "td" else None

    def handle_data(self, data: str) -> None:
        if self._cell:
            self.cells.append((self._cell, data))
            self._cell = None


def test_the_page_has_every_cell_and_needs_nothing_else() -> None:
    shown = [result(s, layout=s) for s in matrix.COLOURS] + [result("fail", 1234.0, "default", "bfloat16")]
    text = matrix.page([report(*shown)])
    page = Page(text)
    assert page.links == [] and "http" not in text
    assert ("pass", "1.2") in page.cells and ("fail", "1e+03") in page.cells
    assert {status for status, _ in page.cells} >= set(matrix.COLOURS)
    assert "<what>" not in text and "&lt;what&gt; it said" in text


def test_the_command_runs_reports_and_shows(tmp_path: Path) -> None:
    runner, path = CliRunner(), tmp_path / "r.json"
    arguments = ["run", "experts=loop", "-k", "edge/no_tokens[float32-default]", "--report", str(path), "--seed", "3"]
    done = runner.invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "1 pass" in done.output and Report.load(path).seed == 3
    done = runner.invoke(app, ["matrix", str(path), "--html", str(tmp_path / "r.html")])
    assert done.exit_code == 0 and "edge/no_tokens" in done.output
    assert "edge/no_tokens" in (tmp_path / "r.html").read_text()

    report(result("fail")).save(path)
    assert runner.invoke(app, ["matrix", str(path)]).exit_code == 1


def test_the_command_says_when_nothing_was_tested(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    # captured CUDA graphs mean nothing on a CPU
    done = CliRunner().invoke(app, ["run", "experts=loop", "-k", "mode/cuda_graph[", "--report", str(path)])
    assert done.exit_code == 2 and "no cell passed or failed" in done.output and Report.load(path).empty


def test_reports_hold_no_folders_of_the_machine(tmp_path: Path) -> None:
    plugin = tmp_path / "a folder" / "kernel.py"
    message = f"""RuntimeError: of its own at {torch.__path__[0]}/nn/functional.py:7139
  File "{measures.__file__}", line 3 in measure
  File "{json.__file__}", line 9
  File "{plugin}", line 1 in kernel
  at /home/somebody/build/kernel.cu:12, in ./here/x.py, 1/2 or https://example.org/a/b"""
    report(replace(result("error"), message=message)).save(tmp_path / "r.json")
    found = Report.load(tmp_path / "r.json").results[0].message
    assert found.splitlines() == [
        "RuntimeError: of its own at torch/nn/functional.py:7139",
        '  File "hf_moe_conformance/measures.py", line 3 in measure',
        '  File "json/__init__.py", line 9',
        '  File "kernel.py", line 1 in kernel',
        "  at kernel.cu:12, in ./here/x.py, 1/2 or https://example.org/a/b",
    ]


def test_a_stack_in_a_report_has_no_folders(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    CliRunner().invoke(app, ["run", "experts=eager", "-k", "edge/int32_ids[float32", "--report", str(path)])
    message = Report.load(path).results[0].message
    assert " at transformers/models/qwen3_moe/modeling_qwen3_moe.py:" in message


def test_the_command_fails_on_a_failure_and_takes_it_when_expected(tmp_path: Path) -> None:
    runner = CliRunner()
    # stock eager counts int64 ids only
    arguments = ["run", "experts=eager", "-k", "edge/int32_ids[float32-default]"]
    assert runner.invoke(app, arguments).exit_code == 1
    expect = tmp_path / "expect.json"
    expect.write_text(json.dumps({"edge/int32_ids[*]": {"reason": "one_hot takes int64 only"}}))
    done = runner.invoke(app, [*arguments, "--expect", str(expect)])
    assert done.exit_code == 0 and "1 xfail" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["experts"], "must read KIND=NAME"),
        (["expert=loop"], "must read KIND=NAME"),
        (["experts=lop"], "did you mean 'loop'"),
        (["experts=loop", "--tier", "fast"], "no tier fast"),
        (["experts=loop", "--dtype", "float8"], "float8"),
        (["experts=loop", "--device", "tpu"], "neither cpu nor cuda"),
        (["experts=loop", "--option", "a"], "NAME=VALUE"),
        (["experts=loop", "--option", "a=1"], "has no option 'a'"),
        (["experts=loop", "-k", "absent"], "nothing would be run"),
        (["experts=loop", "--tier", "ep"], "nothing would be run"),
        (["experts=loop", "--expect", "/absent"], "cannot be read"),
    ],
)
def test_what_the_command_cannot_do_is_said(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["run", *arguments])
    assert done.exit_code == 2 and said in done.output


def test_expectations_are_checked_when_read(tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    path.write_text('{"a": {"why": "x"}}')
    with pytest.raises(ValueError, match="'a' needs a reason"):
        load_expectations(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="must hold an object"):
        load_expectations(path)


def test_results_of_one_status_look_alike() -> None:
    assert len({html for _, html in matrix.COLOURS.values()}) == len(matrix.COLOURS)
    assert matrix.label(replace(result(), status="unsupported")) == "no"
