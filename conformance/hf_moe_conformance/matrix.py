"""Reports as a matrix of checks x dtype x layout: in the terminal, and as one HTML file that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from hf_moe_conformance.report import Report
from hf_moe_conformance.result import Result, Status

COLOURS: dict[Status, tuple[str, str]] = {
    "pass": ("green", "#1a7f37"),
    "xfail": ("yellow", "#bf8700"),
    "unsupported": ("blue", "#57789f"),
    "unavailable": ("bright_black", "#8c959f"),
    "fail": ("red", "#cf222e"),
    "error": ("magenta", "#8250df"),
    "xpass": ("bright_red", "#e85aad"),
}
"""One colour a status: for the terminal, and for HTML."""

SHORT: dict[Status, str] = {
    "pass": "ok",
    "xfail": "xf",
    "unsupported": "no",
    "unavailable": "-",
    "fail": "FAIL",
    "error": "ERR",
    "xpass": "XPASS",
}


def label(result: Result) -> str:
    """What a cell of the matrix says: the worst error in units of eager's where there is one, else the status."""
    worst = result.worst
    if worst is None or result.status in ("unsupported", "unavailable", "error"):
        return SHORT[result.status]
    return f"{worst:.1f}" if worst < 100 else f"{worst:.0e}"


@dataclass(frozen=True)
class Grid:
    """Rows, columns, and the results between them, by (row, column)."""

    corner: str
    rows: list[str]
    columns: list[str]
    cells: dict[tuple[str, str], Result]


def grids(report: Report) -> list[Grid]:
    """Checks x (dtype and layout), and families x checks for whole models, of which there are too many for columns."""
    found = []
    layered = [r for r in report.results if not r.check.startswith("model/")]
    if layered:
        dtypes = list(dict.fromkeys(r.dtype for r in layered))
        # by dtype first, so that a dtype's columns stand together
        columns = sorted({f"{r.dtype}-{r.layout}": r for r in layered}.items(), key=lambda c: dtypes.index(c[1].dtype))
        found.append(
            Grid(
                "check",
                list(dict.fromkeys(r.check for r in layered)),
                [column for column, _ in columns],
                {(r.check, f"{r.dtype}-{r.layout}"): r for r in layered},
            )
        )
    models = [r for r in report.results if r.check.startswith("model/")]
    if models:
        found.append(
            Grid(
                "family",
                list(dict.fromkeys(r.layout for r in models)),
                list(dict.fromkeys(f"{r.dtype}-{r.check}" for r in models)),
                {(r.layout, f"{r.dtype}-{r.check}"): r for r in models},
            )
        )
    return found


def summary(report: Report) -> str:
    """The counts in words: `480 pass, 3 fail`."""
    return ", ".join(f"{count} {status}" for status, count in sorted(report.counts.items()))


def tables(report: Report) -> list[Table]:
    """The matrix for a terminal."""
    found = []
    for grid in grids(report):
        made = Table(title=report.title, caption=summary(report), title_justify="left", pad_edge=False)
        made.add_column(grid.corner, no_wrap=True)
        for column in grid.columns:
            made.add_column(column.replace("-", "\n", 1), justify="right", no_wrap=True)
        for row in grid.rows:
            line = []
            for column in grid.columns:
                result = grid.cells.get((row, column))
                line.append(Text(label(result), style=COLOURS[result.status][0]) if result else Text(""))
            made.add_row(row, *line)
        found.append(made)
    return found


STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; }
table { border-collapse: collapse; margin: 1em 0 2em; }
th { font-weight: 500; text-align: left; padding: 2px 8px; background: #fff; }
thead th { position: sticky; top: 0; vertical-align: bottom; }
tbody th { position: sticky; left: 0; }
td { padding: 2px 6px; color: #fff; text-align: right; border: 1px solid #fff; font-variant-numeric: tabular-nums; }
td.none { border: none; }
pre { white-space: pre-wrap; background: #f6f8fa; padding: 8px; }
""" + "".join(f".{status} {{ background: {colour}; }}\n" for status, (_, colour) in COLOURS.items())


def page(reports: Sequence[Report]) -> str:
    """One self-contained HTML page: the matrix of each report, and below it what each bad cell said."""
    legend = " ".join(f'<td class="{status}">{status}</td>' for status in COLOURS)
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Conformance</title>",
        f"<style>{STYLE}</style><h1>Conformance</h1>",
        "<p>Numbers are the largest rms error of a cell in units of stock eager's own at the same dtype.</p>",
        f"<table><tr>{legend}</tr></table>",
    ]
    for report in reports:
        parts.append(_section(report))
    return "\n".join(parts) + "\n"


def _section(report: Report) -> str:
    lines = [f"<h2>{html.escape(report.title)}</h2><p>{summary(report)}</p>"]
    for grid in grids(report):
        head = "".join(f"<th>{html.escape(column).replace('-', '<br>', 1)}</th>" for column in grid.columns)
        lines.append(f"<table><thead><tr><th>{grid.corner}</th>{head}</tr></thead><tbody>")
        for row in grid.rows:
            line = [f"<th>{html.escape(row)}</th>"]
            line += [_cell(grid.cells.get((row, column))) for column in grid.columns]
            lines.append(f"<tr>{''.join(line)}</tr>")
        lines.append("</tbody></table>")
    for result in report.results:
        if result.status in ("fail", "error", "xpass", "xfail"):
            what = f"{result.cell}: {result.status}"
            lines.append(
                f"<details><summary>{html.escape(what)}</summary><pre>{html.escape(result.message)}</pre></details>"
            )
    return "\n".join(lines)


def _cell(result: Result | None) -> str:
    if result is None:
        return '<td class="none"></td>'
    title = html.escape(f"{result.cell}: {result.status}\n{result.message}"[:2000], quote=True)
    return f'<td class="{result.status}" title="{title}">{label(result)}</td>'
