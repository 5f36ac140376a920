"""`parametrize_with_checks` in a test file of somebody else's."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.usefixtures("mutants_installed")

FILE = """
from hf_moe_conformance.pytest_plugin import parametrize_with_checks

@parametrize_with_checks(
    "experts", "{name}", dtypes=["float32"], tiers=["inference"], seed=3, expected_failures={expected}
)
def test_conformance(check):
    check()
"""


def outcomes(pytester: pytest.Pytester, name: str, expected: str, select: str) -> dict[str, int]:
    pytester.makepyfile(FILE.format(name=name, expected=expected))
    found = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", select, "-W", "ignore")
    counts = found.parseoutcomes()
    counts.pop("deselected", None)
    return counts


def test_each_cell_is_a_test(pytester: pytest.Pytester) -> None:
    assert outcomes(pytester, "loop", "{}", "no_tokens and default") == {"passed": 1}


def test_a_failure_fails_and_an_expected_one_xfails(pytester: pytest.Pytester) -> None:
    assert outcomes(pytester, "output_scaled", "{}", "forward and float32-default and not sentinels") == {"failed": 1}
    assert outcomes(
        pytester,
        "output_scaled",
        '{"forward[float32-default]": "known"}',
        "forward and float32-default and not sentinels",
    ) == {"xfailed": 1}


def test_a_stale_expectation_fails(pytester: pytest.Pytester) -> None:
    expected = '{"edge/no_tokens[float32-default]": "known"}'
    assert outcomes(pytester, "loop", expected, "no_tokens and default") == {"failed": 1}


def test_an_expectation_of_no_cell_is_an_error(pytester: pytest.Pytester) -> None:
    assert outcomes(pytester, "loop", '{"absent": "known"}', "no_tokens") == {"errors": 1}
