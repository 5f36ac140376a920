"""`moe-conformance run | matrix | calibrate`."""

from __future__ import annotations

import json
import secrets
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hf_moe_backends import MoeBackendError
from hf_moe_backends.spec import KINDS
from hf_moe_conformance import matrix as matrices
from hf_moe_conformance.check import TIERS
from hf_moe_conformance.report import Report
from hf_moe_conformance.result import BAD, Result, load_expectations
from hf_moe_conformance.runner import cells_of
from hf_moe_conformance.runner import run as run_cells
from hf_moe_conformance.subject import DEFAULT_DTYPES, Subject

LINES = 6
"""Of a failure's message that are shown while the run goes on."""

FAILED, UNUSABLE = 1, 2
"""Exit codes: a cell failed; the run could not be made as it was asked for."""

app = typer.Typer(
    help="Does a backend compute what stock Transformers computes? Case by case, with the numbers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def run(
    backend: Annotated[str, typer.Argument(metavar="KIND=NAME", help="What to test: experts=torch_mm")],
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[
        list[str] | None, typer.Option(help="May be repeated. Default: float32 and bfloat16. float32 is always run.")
    ] = None,
    tier: Annotated[
        list[str] | None, typer.Option(help="inference, training or ep; may be repeated. Default: all.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="An option of the backend; may be repeated.")
    ] = None,
    matching: Annotated[str | None, typer.Option("-k", help="Only cells whose name contains this.")] = None,
    expect: Annotated[Path | None, typer.Option(help="JSON of cell names to reasons: failures that are known.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write every number to this JSON file.")] = None,
    seed: Annotated[int | None, typer.Option(help="Repeat the sizes and values of an earlier run.")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that one cell may take.")] = 120.0,
    as_of: Annotated[str | None, typer.Option(help="Only checks that this version of the suite had already.")] = None,
) -> None:
    """Test one backend. Exits with 0 when all is well, 1 when a cell fails, 2 when nothing was tested.

    Cells run in a worker process: a hang, a crash or an import error of the backend is recorded and the run goes on.
    """
    console = Console(stderr=True, highlight=False)
    try:
        kind, name = _kind_and_name(backend)
        tiers = _tiers(tier)
        subject = Subject.find(
            kind,
            name,
            options=_options(option),
            device=_device(device),
            dtypes=dtype or DEFAULT_DTYPES,
            seed=secrets.randbelow(10_000) if seed is None else seed,
        )
        cells = cells_of(subject, tiers=tiers, as_of=as_of, matching=matching)
        expectations = load_expectations(expect) if expect else None
        console.print(f"{backend}: {len(cells)} cells on {device}, seed {subject.seed}")
        done = _Progress(console, len(cells))
        results = run_cells(subject, cells, expectations=expectations, timeout=timeout, progress=done)
    except (MoeBackendError, ValueError) as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(UNUSABLE) from None
    found = Report.of(subject, tiers, results)
    if report is not None:
        found.save(report)
    _print(found)
    _exit_as([found])


@app.command()
def matrix(
    reports: Annotated[list[Path], typer.Argument(metavar="REPORT...", help="JSON files that `run` wrote.")],
    html: Annotated[Path | None, typer.Option(help="Write one self-contained HTML page to this file.")] = None,
) -> None:
    """Show reports as matrices of checks x dtype x layout. Exits as the runs did, with 1 where one of them failed."""
    try:
        found = [Report.load(path) for path in reports]
    except ValueError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(UNUSABLE) from None
    for report in found:
        _print(report)
    if html is not None:
        html.write_text(matrices.page(found))
    _exit_as(found)


@app.command()
def calibrate(
    backends: Annotated[list[str], typer.Argument(metavar="KIND=NAME...", help="Correct backends of one kind.")],
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[list[str] | None, typer.Option(help="May be repeated.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many draws of everything.")] = 5,
) -> None:
    """Print, as Markdown, what correct backends score: the distribution that the limits were set by."""
    import torch
    import transformers

    from hf_moe_conformance.calibrate import collect, table

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # as in workers
    try:
        pairs = [_kind_and_name(backend) for backend in backends]
        if len({kind for kind, _ in pairs}) > 1:
            raise ValueError("calibrate backends of one kind at a time")
        scores = collect(
            pairs[0][0],
            [name for _, name in pairs],
            device=_device(device),
            dtypes=dtype or DEFAULT_DTYPES,
            seeds=range(seeds),
            say=lambda text: typer.echo(text, err=True),
        )
    except (MoeBackendError, ValueError) as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(UNUSABLE) from None
    typer.echo(table(scores))


class _Progress:
    """Says at once what goes wrong, and on a terminal how far the run is."""

    def __init__(self, console: Console, total: int):
        self.console, self.total, self.done = console, total, 0

    def __call__(self, result: Result) -> None:
        self.done += 1
        if result.status in BAD:
            colour = matrices.COLOURS[result.status][0]
            self.console.print(result.status.upper(), style=colour, end=" ")
            # cells have names in brackets, which rich would take for its own
            self.console.print(f"{result.cell}\n{_shortened(result.message)}", markup=False)
        elif self.console.is_terminal:
            self.console.print(f"{self.done}/{self.total} {result.cell}", end="\r", markup=False)


def _shortened(message: str) -> str:
    """The first lines; the report has all."""
    lines = message.splitlines()
    more = len(lines) - LINES
    return "\n".join(lines[:LINES] + ([f"... {more} lines more in the report (--report)"] if more > 0 else []))


def _print(report: Report) -> None:
    # in a file or a pipe as wide as it takes, so that nothing is cut
    console = Console(width=None if sys.stdout.isatty() else 400, highlight=False)
    for table in matrices.tables(report):
        console.print(table)


def _exit_as(reports: list[Report]) -> None:
    """End with the exit code of these runs."""
    empty = [report for report in reports if report.empty]
    for report in empty:
        typer.echo(f"{report.title}: no cell passed or failed ({matrices.summary(report)})", err=True)
    if any(report.failed for report in reports):
        raise typer.Exit(FAILED)
    if empty:
        raise typer.Exit(UNUSABLE)


def _kind_and_name(backend: str) -> tuple[Any, str]:
    kind, equals, name = backend.partition("=")
    if not equals or kind not in KINDS or not name:
        raise ValueError(f"{backend!r} must read KIND=NAME, with a kind of {', '.join(KINDS)}")
    return kind, name


def _tiers(asked: list[str] | None) -> tuple[Any, ...]:
    unknown = sorted(set(asked or ()) - set(TIERS))
    if unknown:
        raise ValueError(f"there is no tier {', '.join(unknown)}; choose from {', '.join(TIERS)}")
    return tuple(asked or TIERS)


def _device(device: str) -> str:
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} is neither cpu nor cuda")
    return device


def _options(asked: list[str] | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in asked or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--option {text!r} must read NAME=VALUE")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found
