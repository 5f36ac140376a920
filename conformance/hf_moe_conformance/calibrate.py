"""What correct backends score: the distribution that the measures' limits were set by."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from hf_moe_backends.spec import Kind
from hf_moe_conformance import measures
from hf_moe_conformance.measures import Measure
from hf_moe_conformance.runner import InProcess, cells_of
from hf_moe_conformance.subject import Subject

Scores = dict[tuple[str, str, str], list[Measure]]
"""Measures by backend, device and dtype."""


def collect(
    kind: Kind,
    names: Iterable[str],
    *,
    device: str,
    dtypes: Sequence[str],
    seeds: Iterable[int],
    say: Callable[[str], None] = lambda text: None,
) -> Scores:
    """Run every check that measures in units of eager's error on each seed.

    Whole models are left out, since their unit is fixed, and so is what a backend does not claim and was tried on.
    """
    found: Scores = defaultdict(list)
    seeds = list(seeds)
    for name in names:
        for seed in seeds:
            subject = Subject.find(kind, name, device=device, dtypes=dtypes, seed=seed)
            here = InProcess(subject)
            for cell in cells_of(subject):
                if not cell.check.name.startswith("model/"):
                    result = here.run(cell)
                    if result.status == "unsupported":
                        continue
                    found[name, device, result.dtype] += result.measures
            say(f"{kind}={name}, seed {seed}: {sum(len(v) for k, v in found.items() if k[0] == name)} measures")
    return dict(found)


def table(scores: Scores) -> str:
    """A Markdown table: quantiles of each measure, and how many are outside the limits."""
    lines = [
        "| backend | device | dtype | measures | rms error: median, 99%, max | worst row: 99%, max "
        "| gain, part of its limit: 99%, max | outside |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (name, device, dtype), found in scores.items():
        errors, rows = [m.error for m in found], [m.worst_row for m in found]
        gains = [abs(m.gain) / m.gain_limit for m in found]
        outside = sum(bool(m.problems) for m in found)
        lines.append(
            f"| `{name}` | {device} | {dtype} | {len(found)} "
            f"| {_at(errors, 0.5)}, {_at(errors, 0.99)}, {_at(errors, 1)} | {_at(rows, 0.99)}, {_at(rows, 1)} "
            f"| {_at(gains, 0.99)}, {_at(gains, 1)} | {outside} |"
        )
    lines.append(
        f"\nLimits: rms error {measures.ERROR:g}, worst row {measures.WORST_ROW:g}, both times "
        f"{measures.FLOAT32_SLACK:g} in float32; gain max({measures.GAIN_EPS:g} eps, {measures.GAIN_LEAST:g}, "
        f"{measures.GAIN_SIGMAS:g} relative rms error / sqrt(rows))."
    )
    return "\n".join(lines)


def _at(values: Sequence[float], part: float) -> str:
    # NaN sorts nowhere; it stands for an error without bound
    ordered = sorted(float("inf") if value != value else value for value in values)
    return f"{ordered[min(len(ordered) - 1, int(part * len(ordered)))]:.3g}"
