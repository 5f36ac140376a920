"""Running cells: in this process, or in a worker that may hang or crash without ending the run."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from hf_moe_conformance.check import TIERS, Bench, Cell, Failure, NotApplicable, Tier, check
from hf_moe_conformance.claims import UNREFUSABLE, see_refusal, unclaimed
from hf_moe_conformance.measures import Measure
from hf_moe_conformance.result import Expectations, Result, Status, expected, judge, require_named
from hf_moe_conformance.subject import Subject


def cells_of(
    subject: Subject, *, tiers: Iterable[Tier] = TIERS, as_of: str | None = None, matching: str | None = None
) -> list[Cell]:
    """The subject's cells; with `matching` those whose name contains it.

    Raises:
        ValueError: there are none. A run of nothing must not pass.
    """
    import hf_moe_conformance.checks  # noqa: F401 - declares them

    tiers = list(tiers)
    found = check.cells(subject, tiers=tiers, as_of=as_of)
    if matching:
        found = [cell for cell in found if matching in cell.name]
    if not found:
        wanted = f" matching {matching!r}" if matching else ""
        raise ValueError(f"there is no {subject.kind} check{wanted} in tier {', '.join(tiers)}: nothing would be run")
    return found


class InProcess:
    """Runs cells one by one, sharing the bench of each variant among its cells while they come in order."""

    def __init__(self, subject: Subject):
        self.subject = subject
        self._bench: tuple[object, Bench] | None = None
        self._measures: list[Measure] = []

    def run(self, cell: Cell) -> Result:
        start = time.perf_counter()
        self._measures = []
        status: Status
        widened: tuple[Measure, ...] = ()
        try:
            status, message = self._run(cell)
        except Failure as failure:
            status, message, widened = "fail", str(failure), failure.measures
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit included: whatever a backend raises is its own error
            status, message = "error", _explain(error)
        return _result(cell, status, message, time.perf_counter() - start, tuple(self._measures), widened)

    def _run(self, cell: Cell) -> tuple[Status, str]:
        reason = _unavailable(cell, self.subject)
        if reason:
            return "unavailable", reason
        missing = unclaimed(cell, self.subject)
        if missing - UNREFUSABLE:
            return "unsupported", see_refusal(cell, self.subject, missing)
        try:
            cell.check.run(self.bench(cell))
        except NotApplicable as refusal:
            return "unsupported", str(refusal)
        except Exception as error:
            if not missing:
                raise
            return "unsupported", f"does not claim {', '.join(sorted(missing))}, and: {_explain(error)}"
        return "pass", ""

    def bench(self, cell: Cell) -> Bench:
        key = (cell.check.bench, cell.variant)
        if self._bench is None or self._bench[0] != key:
            self._bench = None  # frees the one before first
            self._bench = (key, cell.check.bench(self.subject, cell.variant))
        bench = self._bench[1]
        bench.measures = self._measures
        return bench


def _unavailable(cell: Cell, subject: Subject) -> str | None:
    if cell.check.device not in (None, subject.device):
        return f"means something on {cell.check.device} only, this run is on {subject.device}"
    if subject.device == "cuda" and not torch.cuda.is_available():
        return "this machine has no CUDA device"
    ranks = cell.variant.layout.ranks
    if subject.device == "cuda" and ranks > torch.cuda.device_count():
        return f"takes {ranks} GPUs, this machine has {torch.cuda.device_count()}"
    return cell.variant.layout.missing


def _explain(error: BaseException) -> str:
    """The exception, and where in the code that is tested it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def run(
    subject: Subject,
    cells: Sequence[Cell],
    *,
    expectations: Expectations | None = None,
    timeout: float | None = None,
    progress: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run cells and hold the results against what was expected.

    Args:
        timeout: seconds a cell may take. With it, cells run in a worker process: a hang, a crash or an exit is the
            error of the cell that it happened in, and the others go on in a new worker. Without it they run here.

    Raises:
        ValueError: no cells, or an expectation that names none of them.
    """
    if not cells:
        raise ValueError("there are no cells: nothing would be run")
    expectations = expectations or {}
    require_named(expectations, [cell.name for cell in cells])
    results = []
    for result in _results(subject, cells, timeout):
        judged = judge(result, expected(result.cell, expectations))
        results.append(judged)
        progress(judged)
    return results


def _results(subject: Subject, cells: Sequence[Cell], timeout: float | None) -> Iterator[Result]:
    if timeout is not None:
        from hf_moe_conformance.worker import run_in_workers

        yield from run_in_workers(subject, cells, timeout)
        return
    here = InProcess(subject)
    for cell in cells:
        yield here.run(cell)


def missing_result(cell: Cell, message: str, seconds: float) -> Result:
    """The error of a cell that gave no result of its own."""
    return _result(cell, "error", message, seconds)


def _result(
    cell: Cell,
    status: Status,
    message: str,
    seconds: float,
    measures: tuple[Measure, ...] = (),
    widened: tuple[Measure, ...] = (),
) -> Result:
    return Result(
        cell=cell.name,
        check=cell.check.name,
        tier=cell.check.tier,
        dtype=cell.variant.dtype,
        layout=cell.variant.layout.name,
        status=status,
        message=message,
        seconds=seconds,
        measures=measures,
        widened=widened,
    )
