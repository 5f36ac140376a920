"""How far a result is from the float64 reference, against how far stock eager is at the same dtype.

A tolerance that suits bfloat16 hides a 1% error of scale, and one that suits float32 fails correct kernels. So nothing
here is an absolute tolerance. Eager's own error on the same inputs is the unit, and three measures of it together leave
a wrong result nowhere to hide:

1. **error**: rms error over eager's rms error. At most `ERROR`.
2. **gain**: `<got, reference> / <reference, reference>`. Rounding errors cancel in it, errors of scale do not.
3. **worst row**: the worst row's rms error over eager's worst row's, at most `WORST_ROW`. One lost token vanishes in an
   rms over thousands.

The limits are calibrated on correct backends: README.md has the distribution, `moe-conformance calibrate` makes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ERROR = 3.0
"""Limit of the rms error, in units of eager's."""

WORST_ROW = 5.0
"""Limit of the worst row's rms error, in units of eager's worst row's."""

FLOAT32_SLACK = 2.0
"""Both limits are this many times wider in float32. There another order of a long sum, or a faster exp, is 3 to 5 times
eager's error and no bug, while what is one (a product in TF32, a weight rounded to bfloat16) scores hundreds."""

GAIN_EPS = 0.75
GAIN_LEAST = 1e-6
GAIN_SIGMAS = 5.0
"""|gain - 1| is at most max(GAIN_EPS * eps, GAIN_LEAST, GAIN_SIGMAS * relative rms error / sqrt(rows)).

The first is what a dtype's functions are off by on average and is still less than 1% in bfloat16. The second is for
float32, where a GPU's exp is off by two eps and no error of scale is that small. The third is the noise that so many
independent roundings leave in the mean. Rows and not elements, since a row shares errors: its router weight is rounded
once."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One tensor of one case, pooled over seeds.

    Attributes:
        tensor: `y`, `dX`, `d_router`, `dW_up`, ...
        case: which inputs, in words.
        error, worst_row: in units of eager's.
        error_limit, worst_row_limit: what these may be here.
        gain: minus one, so that it prints with its digits.
        gain_limit: what |gain| may be here.
        rms: the relative rms error itself; `eager_rms` eager's, before flooring.
        elements: how many numbers were compared.
    """

    tensor: str
    case: str
    error: float
    error_limit: float
    gain: float
    gain_limit: float
    worst_row: float
    worst_row_limit: float
    rms: float
    eager_rms: float
    elements: int

    @property
    def problems(self) -> list[str]:
        """What is outside its limit, in words."""
        where = f"{self.tensor} ({self.case})"
        found = []
        if not self.error <= self.error_limit:  # written so that NaN is a problem
            found.append(
                f"{where}: rms error {self.error:.3g} times eager's, limit {self.error_limit:g} "
                f"(relative {self.rms:.2e})"
            )
        if not abs(self.gain) <= self.gain_limit:
            found.append(f"{where}: gain 1{self.gain:+.2e}, limit 1±{self.gain_limit:.1e}")
        if not self.worst_row <= self.worst_row_limit:
            found.append(
                f"{where}: worst row's error {self.worst_row:.3g} times eager's worst, limit {self.worst_row_limit:g}"
            )
        return found


def measure(
    tensor: str,
    case: str,
    got: Sequence[Tensor],
    eager: Sequence[Tensor],
    reference: Sequence[Tensor],
    *,
    precision: torch.dtype | None = None,
) -> Measure:
    """Compare the results of several seeds with the reference.

    Args:
        got, eager: one tensor a seed. Rows are along the last dimension.
        reference: the same in float64.
        precision: what may be rounded to on the way, by default the dtype of `got`. Under autocast it is lower.

    Raises:
        ValueError: a result of another shape than the reference's, or no elements to compare.
    """
    for one, expected in zip(got, reference, strict=True):
        if one.shape != expected.shape:
            raise ValueError(f"{tensor} ({case}) has shape {tuple(one.shape)}, expected {tuple(expected.shape)}")
    ours, theirs, expected = _rows(got), _rows(eager), _rows(reference)
    if expected.numel() == 0:
        raise ValueError(f"{tensor} ({case}) has no elements, so there is nothing to compare")
    precision = precision or got[0].dtype
    eps = torch.finfo(precision).eps
    slack = FLOAT32_SLACK if precision == torch.float32 else 1.0
    error_limit, worst_row_limit = slack * ERROR, slack * WORST_ROW

    error, eager_error = ours - expected, theirs - expected
    # where eager happens to be exact, half an ulp of the reference is what any rounding to this dtype may cost
    half_ulp = 0.5 * eps * torch.exp2(torch.floor(torch.log2(expected.abs().clamp_min(1e-300))))
    scale = _rms(expected)
    floor = _rms(half_ulp)
    unit = max(_rms(eager_error), floor)
    worst_unit = max(_worst_row(eager_error), floor)
    relative = _rms(error) / scale if scale else math.inf
    power = expected.square().sum().item()
    gain = ((ours * expected).sum().item() / power if power else math.nan) - 1.0
    # eager's error or ours, whichever is larger: the first measure bounds how much larger ours may be
    noise = GAIN_SIGMAS * max(min(relative, error_limit * unit / scale), unit / scale) / math.sqrt(len(expected))
    return Measure(
        tensor=tensor,
        case=case,
        error=_ratio(_rms(error), unit),
        error_limit=error_limit,
        gain=gain,
        gain_limit=max(GAIN_EPS * eps, GAIN_LEAST, noise),
        worst_row=_ratio(_worst_row(error), worst_unit),
        worst_row_limit=worst_row_limit,
        rms=relative,
        eager_rms=_rms(eager_error) / scale if scale else math.inf,
        elements=expected.numel(),
    )


def _rows(tensors: Sequence[Tensor]) -> Tensor:
    """(N, width) of all seeds, in float64 on the CPU. Seeds may differ in their number of rows."""
    return torch.cat([t.detach().double().cpu().reshape(-1, t.shape[-1] if t.ndim else 1) for t in tensors])


def _rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item()


def _worst_row(error: Tensor) -> float:
    return error.square().mean(-1).max().sqrt().item()


def _ratio(value: float, unit: float) -> float:
    if unit:
        return value / unit
    return 0.0 if value == 0 else math.inf
