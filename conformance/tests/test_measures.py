"""What each of the three measures sees, and what it lets through."""

from __future__ import annotations

import math

import pytest
import torch
from hf_moe_conformance.measures import ERROR, measure
from torch import Tensor


def case(dtype: torch.dtype, rows: int = 400) -> tuple[Tensor, Tensor]:
    """A reference, and what rounding twice makes of it."""
    reference = torch.randn(rows, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(reference.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    eager = (reference * (1 + 0.5 * torch.finfo(dtype).eps * noise)).to(dtype)
    return reference, eager


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_eager_itself_is_within(dtype: torch.dtype) -> None:
    reference, eager = case(dtype)
    found = measure("y", "case", [eager], [eager], [reference])
    assert found.problems == []
    assert found.error == pytest.approx(1) and found.worst_row == pytest.approx(1)
    assert found.elements == reference.numel()


def test_an_error_of_scale_in_bfloat16_is_seen_by_the_gain_alone() -> None:
    reference, eager = case(torch.bfloat16)
    found = measure("y", "case", [(eager.float() * 1.01).bfloat16()], [eager], [reference])
    assert found.error <= ERROR and len(found.problems) == 1 and "gain" in found.problems[0]


def test_a_lost_row_is_seen_by_the_worst_row_alone() -> None:
    reference, eager = case(torch.bfloat16, rows=100_000)
    got = eager.clone()
    got[5] = 0
    found = measure("y", "case", [got], [eager], [reference])
    assert found.error <= ERROR and len(found.problems) == 1 and "worst row" in found.problems[0]


def test_a_downcast_is_seen_in_float32() -> None:
    reference, eager = case(torch.float32)
    found = measure("y", "case", [eager.bfloat16().float()], [eager], [reference])
    assert found.error > 1000


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_none_fails_all_three(value: float) -> None:
    reference, eager = case(torch.float32)
    got = eager.clone()
    got[0, 0] = value
    assert len(measure("y", "case", [got], [eager], [reference]).problems) == 3


def test_zeros_fail() -> None:
    reference, eager = case(torch.float32)
    assert measure("y", "case", [torch.zeros_like(eager)], [eager], [reference]).problems


def test_where_eager_is_exact_half_an_ulp_is_allowed() -> None:
    reference = torch.randint(1, 100, (50, 64), generator=torch.Generator().manual_seed(0)).double()
    eager = reference.float()
    one_ulp = torch.nextafter(eager, torch.tensor(math.inf))
    assert measure("y", "case", [eager], [eager], [reference]).problems == []
    assert measure("y", "case", [one_ulp], [eager], [reference]).error == pytest.approx(2)
    assert measure("y", "case", [eager + 20 * (one_ulp - eager)], [eager], [reference]).problems


def test_draws_of_other_lengths_are_pooled() -> None:
    reference, eager = case(torch.float32)
    pooled = measure("y", "case", [eager[:7], eager[7:]], [eager[:7], eager[7:]], [reference[:7], reference[7:]])
    assert pooled.error == pytest.approx(1) and pooled.elements == reference.numel()


def test_what_cannot_be_compared_raises() -> None:
    reference, eager = case(torch.float32)
    with pytest.raises(ValueError, match="shape"):
        measure("y", "case", [eager[:-1]], [eager], [reference])
    with pytest.raises(ValueError, match="nothing to compare"):
        measure("y", "case", [eager[:0]], [eager[:0]], [reference[:0]])
