"""What the demonstration prints."""

from __future__ import annotations

from itertools import pairwise

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from hf_moe_backends.demo import JUDGED_STEPS, LIMIT, Job, Report
from hf_moe_backends.demo.inputs import Corpus
from hf_moe_backends.demo.side import CLIP, RATE, WARM_UP, Side
from hf_moe_backends.plan import Plan

_ROWS = 10
_BLOCKS = "▁▂▃▄▅▆▇█"


class Screen:
    """An `Observer` that prints to `console`. Progress bars go to standard error, beside the results."""

    def __init__(self, console: Console):
        self.console = console
        self.steps = 0
        self.bar: tuple[Progress, Side] | None = None

    def planned(self, job: Job, plan: Plan, parameters: int, corpus: Corpus) -> None:
        self.steps = job.steps
        model = job.model or "a new Qwen3-MoE, 8 layers of 32 experts, 4 a token"
        self._line(f"model   {model}: {parameters / 1e6:.1f} million parameters, {job.dtype} on {job.device}")
        again = f", read {corpus.passes:.1f} times: it is short for these steps" if corpus.passes > 1 else ""
        self._line(f"text    {corpus.source}, {corpus.count:,} tokens, {corpus.tokens}{again}")
        self._line(
            f"steps   {job.steps} of {job.batch} x {job.sequence} tokens, AdamW at {RATE:g} after {WARM_UP} steps of "
            f"warm-up, gradients clipped to {CLIP:g}, seed {job.seed}"
        )
        self._line(f"\n{plan}\n")

    def stepped(self, side: Side, step: int, loss: float) -> None:
        if self.bar is None:
            progress = Progress(
                TextColumn("{task.description:<15}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("loss {task.fields[loss]:.3f}"),
                console=Console(stderr=True),
            )
            progress.add_task(side.label, total=self.steps, loss=loss)
            progress.start()
            self.bar = progress, side
        progress, _ = self.bar
        progress.update(progress.task_ids[0], completed=step, loss=loss)
        if step == self.steps:
            progress.stop()
            self.bar = None

    def skipped(self, note: str) -> None:
        self._line(note)

    def finished(self, report: Report) -> None:
        self._line("")
        self.console.print(_costs(report))
        self.console.print(_curves(report))
        for label, differences in report.differences.items():
            early, late = differences[:JUDGED_STEPS], differences[JUDGED_STEPS:]
            line = f"{label} parts from stock eager by at most {max(early):.1e} over the first {len(early)} steps"
            line += f", {max(late):.1e} after them" if late else ""
            self._line(line)
        judged = f"the limit for the chosen backends is {LIMIT:.0e}"
        if report.job.dtype != "float32":
            judged = "not judged: in bfloat16 a rounded router score flips the choice of experts"
        self._line(f"  {judged}")
        reload, words = report.reload, "bit-equal" if report.reload.equal else "NOT equal"
        self._line(
            f"saved, and reloaded by transformers {reload.transformers} in a process without hf_moe_backends: logits "
            f"{words} (greatest difference {reload.greatest_difference:.3g})"
        )
        if report.job.output is not None:
            self._line(f"the checkpoint is in {report.job.output}")

    def _line(self, text: str) -> None:
        self.console.print(Text(text))


def _costs(report: Report) -> Table:
    job = report.job
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", "step", "tokens/s", "against eager", "peak memory", "loss"):
        table.add_column(name, justify="left" if name in ("", "loss") else "right")
    eager = report.runs[0].step_seconds
    for run in report.runs:
        table.add_row(
            run.label,
            f"{1000 * run.step_seconds:.0f} ms",
            f"{job.batch * job.sequence / run.step_seconds:,.0f}",
            f"{eager / run.step_seconds:.2f} x",
            f"{run.peak_bytes / 2**20:,.0f} MiB" if run.peak_bytes is not None else "not told",
            f"{run.losses[0]:.3f} -> {run.losses[-1]:.3f}  {sparkline(run.losses)}",
        )
    what = "most allocated" if job.device == "cuda" else "weights, and growth of the process's memory in training"
    table.caption = f"step: median after the first 3; peak memory: {what}"
    table.caption_justify = "left"
    return table


def _curves(report: Report) -> Table:
    """The losses side by side, every few steps, with the last judged step and the last of all among them."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("step", justify="right")
    for run in report.runs:
        table.add_column(run.label, justify="right")
    for label in report.differences:
        table.add_column(f"{label} - eager", justify="right")
    steps = report.job.steps
    every = max(1, steps // _ROWS)
    shown = sorted({1, *range(every, steps + 1, every), min(JUDGED_STEPS, steps), steps})
    for step in shown:
        losses = [f"{run.losses[step - 1]:.6f}" for run in report.runs]
        parts = [f"{differences[step - 1]:.1e}" for differences in report.differences.values()]
        table.add_row(str(step), *losses, *parts, end_section=step == JUDGED_STEPS)
    table.caption = "differences are relative"
    table.caption_justify = "left"
    return table


def sparkline(values: list[float], width: int = 20) -> str:
    """Means of `width` equal parts of a curve as blocks, from its own lowest to its own highest."""
    width = min(width, len(values))
    bounds = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    if not low < high:  # flat, or NaN
        return _BLOCKS[0] * width
    return "".join(_BLOCKS[round((mean - low) / (high - low) * (len(_BLOCKS) - 1))] for mean in means)
