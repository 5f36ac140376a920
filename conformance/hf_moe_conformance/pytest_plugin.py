"""The suite as pytest tests of a plugin's own.

    from hf_moe_conformance.pytest_plugin import parametrize_with_checks

    @parametrize_with_checks("experts", "mykernel", expected_failures={"grad/dW_up[bfloat16-*]": "upstream issue 12"})
    def test_conformance(check):
        check()

Checks run in pytest's own process, so that `--pdb` works and coverage sees them. There a hang is pytest's to end (with
pytest-timeout, say) and a crash takes pytest with it; `moe-conformance run` survives both.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from hf_moe_backends.spec import Kind
from hf_moe_conformance.check import TIERS, Cell, Tier
from hf_moe_conformance.result import BAD, Expectations, expected, judge, require_named
from hf_moe_conformance.runner import InProcess, cells_of
from hf_moe_conformance.subject import DEFAULT_DTYPES, Subject


class Runnable:
    """One cell, to be called by its test."""

    def __init__(self, cell: Cell, here: InProcess, expectations: Expectations):
        self.cell, self._here, self._expectations = cell, here, expectations

    def __call__(self) -> None:
        """Run it. Returns on pass and on a refusal that was due, xfails or skips with the reason, fails otherwise."""
        __tracebackhide__ = True
        result = judge(self._here.run(self.cell), expected(self.cell.name, self._expectations))
        if result.status == "unavailable":
            pytest.skip(result.message)
        if result.status == "xfail":
            pytest.xfail(result.message)
        if result.status in BAD:
            pytest.fail(f"{result.cell}: {result.status} (seed {self._here.subject.seed})\n{result.message}", False)

    def __repr__(self) -> str:
        return self.cell.name


def parametrize_with_checks(
    kind: Kind,
    name: str,
    *,
    expected_failures: Expectations | None = None,
    options: Mapping[str, Any] | None = None,
    device: str = "cpu",
    dtypes: Sequence[str] = DEFAULT_DTYPES,
    tiers: Iterable[Tier] = TIERS,
    seed: int | None = None,
    argument: str = "check",
) -> pytest.MarkDecorator:
    """Parametrize a test with every cell of one backend; the test calls its argument.

    Args:
        expected_failures: cell names, `*` standing for any text, to the reason. Strict.
        seed: of sizes and values. By default drawn anew, and part of every failure's message.

    Raises:
        ConfigError: there is no such backend.
        ValueError: no cells, or an expected failure that names none of them.
    """
    expectations = expected_failures or {}
    subject = Subject.find(
        kind,
        name,
        options=options,
        device=device,
        dtypes=dtypes,
        seed=secrets.randbelow(10_000) if seed is None else seed,
    )
    cells = cells_of(subject, tiers=tiers)
    require_named(expectations, [cell.name for cell in cells])
    here = InProcess(subject)
    return pytest.mark.parametrize(argument, [Runnable(cell, here, expectations) for cell in cells], ids=repr)
