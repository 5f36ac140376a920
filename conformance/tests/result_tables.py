"""The tables in README.md made from committed reports. `python tests/result_tables.py` writes them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_moe_conformance.report import Report
from hf_moe_conformance.result import BAD, Result

from hf_moe_backends.spec import STOCK_NAMES

README = Path(__file__).parents[1] / "README.md"
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "conformance"
DEVICES = {"cpu": "CPU", "cuda": "H200"}
TRANSFORMERS = "https://github.com/huggingface/transformers"


@dataclass(frozen=True, kw_only=True)
class Known:
    """Why a stock backend fails some cells.

    Attributes:
        checks: the checks it is about, as a pattern.
        said: what their messages say, as a pattern.
        why: in words, with the public issue where one is known.
        versions: of Transformers, empty for all. It would otherwise explain a bug that has come back.
    """

    backend: str
    checks: str
    said: str
    why: str
    versions: tuple[str, ...] = ()

    def explains(self, report: Report, result: Result) -> bool:
        return (
            self.backend == backend_of(report)
            and re.fullmatch(self.checks, result.check) is not None
            and re.search(self.said, result.message) is not None
            and (not self.versions or report.versions["transformers"] in self.versions)
        )


def issue(number: int) -> str:
    return f"[#{number}]({TRANSFORMERS}/issues/{number})"


KNOWN = (
    Known(
        backend="experts=eager",
        checks=r"sentinels/.*",
        said="Class values must be smaller than num_classes|index 8 is out of bounds",
        why=f"Pairs of other ranks have an id that is one too large for `one_hot` or the weights ({issue(48610)}). "
        "5.24 has it mended in most families, not in gpt_oss, openai_privacy_filter and nemotron_h",
    ),
    Known(
        backend="experts=eager",
        checks=r"edge/no_tokens_backward|sentinels/all",
        said="does not require grad",
        why="Without pairs to serve it returns new zeros, which autograd does not know. "
        "Under expert parallelism the other ranks then wait for this one in their backward",
    ),
    Known(
        backend="experts=eager",
        checks="edge/int32_ids",
        said="LongTensor",
        why="`one_hot` takes int64 only. Stock routers give int64",
    ),
    Known(
        backend="experts=eager",
        checks="mode/compile",
        said="data-dependent|torch._check",
        why="The loop runs over the experts that were chosen, which is data",
    ),
    Known(
        backend="experts=batched_mm",
        checks=r"sentinels/(d_router|all)",
        said="d_router is",
        why=f"Pairs of other ranks run on a local expert. Their weight of zero hides it from the output, not from the "
        f"router's gradient ({issue(48687)})",
        versions=("5.17.0",),
    ),
    Known(
        backend="experts=batched_mm",
        checks=r"grad/d[Wb]_(up|down)",
        said=r"\A(d[Wb]_(up|down) .*\n?)+\Z",
        why="Each pair's gradient of its expert's weights is rounded to bfloat16, and so is their running sum",
    ),
    Known(
        backend="experts=grouped_mm",
        checks=r"grad/db_(up|down)|edge/strided_backward",
        said=r"\A(db_(up|down) .*\n?)+\Z",
        why="Biases are gathered row by row, so that their gradient is a sum in bfloat16 over an expert's tokens",
    ),
    Known(
        backend="experts=grouped_mm",
        checks=r"edge/odd_sizes(_backward)?",
        said="strides should be multiple of 16 bytes",
        why=f"Rows that are no multiple of 16 bytes are handed to torch, which says no ({issue(48644)})",
    ),
    Known(
        backend="experts=grouped_mm",
        checks="mode/compile",
        said="grouped_mm_fallback_backward",
        why="Other dtypes than bfloat16 are compiled with a fallback whose backward looks at the counts",
        versions=("5.17.0",),
    ),
    Known(
        backend="experts=grouped_mm",
        checks=r"mode/cuda_graph(_backward)?",
        said="during CUDA graph capture",
        why="torch's grouped product has a kernel for bfloat16 only. The fallback for float32 reads the offsets on the "
        "host ([pytorch#169970](https://github.com/pytorch/pytorch/issues/169970))",
    ),
)


ELSEWHERE = (
    "| `attn=` a function registered without a mask function | 5.17.0, 5.24.0 | CPU | `padding/left`, `packed` "
    "(`attn=mask_unregistered`, float32-gqa) | rms error 4.84e+06 to 6.93e+06 (relative 0.51 to 0.62), limit 6 "
    f"| It is handed no mask, in silence ([#45811]({TRANSFORMERS}/pull/45811) warns in the documentation) |",
    "| stock `ep_dispatch_experts` | 5.20.0, 5.22.0 | CPU | expert gradients with ep == fsdp "
    "(`tests/test_expert_gradients.py`, float32, two ranks) | 0.5 times the right ones, in 5.23.0 1.0 times "
    "| They are divided by the number of batches twice: by `fully_shard` and by FSDP2 itself |",
)
"""Rows of failures that no report can have: a user's own backend, and a mesh that dispatchers are refused on."""


class Unexplained(ValueError):
    """A stock backend failed and nobody has written why."""


def stock(reports: Sequence[Report], known: Sequence[Known] = KNOWN) -> str:
    """One row an explanation and device: what fails, by how much, and why.

    Raises:
        Unexplained: a cell of a stock backend failed for none of the reasons.
        ValueError: a reason that no cell fails for any more, or no report of a stock backend.
    """
    ran = [r for r in reports if r.subject["name"] in STOCK_NAMES[r.subject["kind"]]]
    if not ran:
        raise ValueError("there are no reports of stock backends")
    rows: dict[tuple[int, str], list[tuple[Report, Result]]] = {}
    for report in ran:
        for result in report.results:
            if result.status in BAD:
                rows.setdefault((_reason(report, result, known), report.device["type"]), []).append((report, result))
    stale = [known[i] for i in range(len(known)) if i not in {index for index, _ in rows}]
    if stale:
        raise ValueError(f"nothing fails for this any more: {stale}")
    lines = ["| backend | Transformers | on | what fails | measured | why |", "|---|---|---|---|---|---|"]
    for (index, device), found in sorted(rows.items()):
        versions = ", ".join(sorted({report.versions["transformers"] for report, _ in found}))
        lines.append(
            f"| `{known[index].backend}` | {versions} | {DEVICES[device]} | {_cells(found)} | {_measured(found)} "
            f"| {known[index].why} |"
        )
    return "\n".join([*lines, *ELSEWHERE, "", _right(ran)])


def _reason(report: Report, result: Result, known: Sequence[Known]) -> int:
    """Which of the reasons it is."""
    for index, one in enumerate(known):
        if one.explains(report, result):
            return index
    raise Unexplained(f"{report.title}\n{result.cell}: {result.message}")


def _cells(found: Iterable[tuple[Report, Result]]) -> str:
    """`check`, `check`: dtypes, layouts. Checks that fail on the same are named together."""
    found = list(found)
    places: dict[str, list[str]] = {}
    for check in dict.fromkeys(result.check for _, result in found):
        of_check = [(report, result) for report, result in found if result.check == check]
        where = []
        for dtype in sorted({result.dtype for _, result in of_check}, reverse=True):
            layouts = list(dict.fromkeys(r.layout for _, r in of_check if r.dtype == dtype))
            ran = {
                (id(report), r.layout)
                for report, _ in of_check
                for r in report.results
                if r.check == check and r.dtype == dtype and r.status != "unavailable"
            }
            failed = {(id(report), r.layout) for report, r in of_check if r.dtype == dtype}
            where.append(f"{dtype}: {'every layout' if ran == failed else ', '.join(layouts)}")
        if len(where) == 2 and len({text.split(": ", 1)[1] for text in where}) == 1:
            where = [f"both dtypes: {where[0].split(': ', 1)[1]}"]
        places.setdefault("; ".join(where), []).append(f"`{check}`")
    return "<br>".join(f"{', '.join(checks)} ({place})" for place, checks in places.items())


def _measured(found: Iterable[tuple[Report, Result]]) -> str:
    """The measures that are outside their limits, else the number in the message, else the exception."""
    results = [result for _, result in found]
    measures = [m for r in results for m in r.measures if m.problems]
    if measures:
        parts = [
            _range("rms error", [(m.error, m.error_limit) for m in measures]),
            _range("worst row", [(m.worst_row, m.worst_row_limit) for m in measures]),
            _range("gain, part of its limit,", [(abs(m.gain) / m.gain_limit, 1.0) for m in measures]),
        ]
        return "<br>".join(filter(None, parts))
    numbers = [float(n) for r in results for n in re.findall(r"is up to ([0-9.e+-]+) ", r.message)]
    if numbers:
        return f"{min(numbers):.3g} to {max(numbers):.3g}, limit 0"
    return "<br>".join(dict.fromkeys(f"`{_exception(r.message)}`" for r in results))


def _exception(message: str) -> str:
    """Its type and what it says, without where it was raised."""
    lines = message.splitlines()
    text = lines[0]
    if text.endswith("raised:"):  # the compiler's own exception, around the one that says something
        text = lines[1]
    return re.sub(r" at \S+$", "", text).partition(". ")[0][:100]


def _range(what: str, values: Iterable[tuple[float, float]]) -> str:
    """The values outside their limit, and the limit."""
    bad = [(value, limit) for value, limit in values if not value <= limit]
    if not bad:
        return ""
    low, high = f"{min(v for v, _ in bad):.3g}", f"{max(v for v, _ in bad):.3g}"
    limits = ", ".join(dict.fromkeys(f"{limit:g}" for _, limit in bad))
    return f"{what} {low if low == high else f'{low} to {high}'}, limit {limits}"


def _right(ran: Iterable[Report]) -> str:
    """Which stock backends fail nothing, and what all this was run on."""
    right: dict[str, list[str]] = {}
    for report in ran:
        if not report.failed:
            where = f"{report.versions['transformers']} on {DEVICES[report.device['type']]}"
            right.setdefault(backend_of(report), []).append(where)
    said = "; ".join(f"`{name}` ({', '.join(places)})" for name, places in right.items())
    return f"Without a failure: {said}." if said else ""


def backend_of(report: Report) -> str:
    return f"{report.subject['kind']}={report.subject['name']}"


def calibration(texts: Sequence[str]) -> str:
    """The rows of the files that `moe-conformance calibrate` gave, under one head, and where each comes from."""
    heads = {line for text in texts for line in text.splitlines() if line.startswith("| backend")}
    rows = [line for text in texts for line in text.splitlines() if line.startswith("| `")]
    limits = dict.fromkeys(line for text in texts for line in text.splitlines() if line.startswith("Limits:"))
    if len(heads) != 1 or len(limits) != 1:
        raise ValueError("the calibrations are of different versions of the suite")
    made = [line for text in texts for line in text.splitlines() if line.startswith("torch ")]
    head = heads.pop()
    rule = "|---" * head.count(" | ") + "|---|"
    return "\n".join([head, rule, *rows, "", *limits, "", "<br>".join(made)])


def reports() -> Iterator[Report]:
    for path in sorted(RESULTS.glob("*.json.gz")):
        yield Report.load(path)


def tables() -> dict[str, str]:
    """The text between each pair of markers."""
    files = [path.read_text() for path in sorted(RESULTS.glob("calibration-*.md"))]
    return {"stock": stock(list(reports())), "calibration": calibration(files)}


def generate() -> str:
    """README.md with its tables made anew."""
    text = README.read_text()
    for name, table in tables().items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        before, found, rest = text.partition(begin)
        assert found and end in rest, f"README.md must have a place for the table {name!r}"
        text = before + begin + table + "\n" + end + rest.partition(end)[2]
    return text


if __name__ == "__main__":
    README.write_text(generate())
