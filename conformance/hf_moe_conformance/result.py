"""The outcome of one cell, and what was expected of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hf_moe_conformance.measures import Measure

Status = Literal["pass", "fail", "xfail", "xpass", "unsupported", "unavailable", "error"]
BAD: frozenset[Status] = frozenset({"fail", "xpass", "error"})
"""The statuses that fail a run."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One cell's outcome.

    | status | |
    |---|---|
    | pass | it computes what eager computes |
    | fail | it does not; `message` says what is wrong |
    | xfail | a failure or error that was expected; `message` has the reason |
    | xpass | an expected failure that is none any more. Fails the run |
    | unsupported | not claimed, and the refusal was seen; `message` is the refusal |
    | unavailable | cannot be run here: another device, another Transformers |
    | error | an exception, a crash or a hang |

    `widened` holds the measures of a failure that consists of them alone, so that a wider limit can be applied.
    """

    cell: str
    check: str
    tier: str
    dtype: str
    layout: str
    status: Status
    message: str = ""
    seconds: float = 0.0
    measures: tuple[Measure, ...] = ()
    widened: tuple[Measure, ...] = ()

    @property
    def worst(self) -> float | None:
        """The largest error of its measures, in units of eager's."""
        return max((m.error for m in self.measures), default=None)

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        del values["widened"]  # part of measures
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Result:
        return cls(
            **{**values, "measures": tuple(Measure(**m) for m in values["measures"])},
        )


@dataclass(frozen=True)
class ExpectedFailure:
    """Why a cell is known to fail.

    Args:
        reason: in words; where there is an upstream issue, `issue` is its address.
        limit: accepted for the rms error and the worst row, in units of eager's, in the place of the suite's limits.
            The gain's limit stays. Without it any failure is expected.
    """

    reason: str
    limit: float | None = None
    issue: str | None = None

    def __str__(self) -> str:
        return f"{self.reason} ({self.issue})" if self.issue else self.reason


Expectations = Mapping[str, "ExpectedFailure | str"]
"""Cell names, `*` standing for any text, to the reason. Strict: a cell that does not fail after all is an `xpass`."""


def expected(cell: str, expectations: Expectations) -> ExpectedFailure | None:
    """What is expected of a cell, or None. An exact name goes before a pattern."""
    found = expectations.get(cell)
    if found is None:
        for pattern, reason in expectations.items():
            if "*" in pattern and re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), cell):
                found = reason
                break
    return ExpectedFailure(found) if isinstance(found, str) else found


def require_named(expectations: Expectations, cells: Iterable[str]) -> None:
    """Raise ValueError for an expectation that names none of the cells: it is stale, or misspelled."""
    names = list(cells)
    for pattern in expectations:
        if not any(expected(name, {pattern: ""}) for name in names):
            raise ValueError(f"the expected failure {pattern!r} names no cell of this run")


def judge(result: Result, expectation: ExpectedFailure | None) -> Result:
    """The result in the light of what was expected of it."""
    if expectation is None or result.status in ("xfail", "xpass", "unavailable"):
        return result
    if result.status in ("pass", "unsupported"):
        message = f"expected to fail, and is {result.status}: take the expectation out. It said: {expectation}"
        return replace(result, status="xpass", message=message)
    if expectation.limit is not None:
        limit = expectation.limit
        within = [max(m.error, m.worst_row) <= limit and abs(m.gain) <= m.gain_limit for m in result.widened]
        if not within or not all(within):
            return replace(result, message=f"beyond what is expected (limit {limit:g}): {result.message}")
    return replace(result, status="xfail", message=f"{expectation}\n{result.message}")


def load_expectations(path: Path) -> dict[str, ExpectedFailure]:
    """Read a JSON file of cell names to a reason, or to an object with `reason`, `limit` and `issue`.

    Raises:
        ValueError: the file has another form; the message says where.
    """
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold an object of cell names to reasons")
    found = {}
    for cell, value in values.items():
        try:
            found[cell] = ExpectedFailure(value) if isinstance(value, str) else ExpectedFailure(**value)
        except TypeError as error:
            raise ValueError(f"{path}: {cell!r} needs a reason, or reason, limit and issue: {error}") from error
    return found
