"""The demonstration: fine-tune on stock code, then on backends, from the same weights and batches, and compare.

`run` is the whole of it. `inputs` makes the model and the batches, `side` trains one side in a process of its own,
`roundtrip` reloads the trained checkpoint without this package, `show` is what the terminal sees.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from hf_moe_backends.config import BackendConfig
from hf_moe_backends.demo import inputs, roundtrip
from hf_moe_backends.demo.inputs import Corpus
from hf_moe_backends.demo.side import CHOSEN, Run, Side, train
from hf_moe_backends.errors import MoeBackendError
from hf_moe_backends.explain import explain
from hf_moe_backends.plan import Plan

JUDGED_STEPS = 20
"""The steps over which the curves must agree. After that rounding alone parts them: stock from stock, too."""

LIMIT = 1e-4
"""The greatest relative difference of two losses in float32 over those steps.

Correct backends stay between 1e-7 and 1e-5 on the demo's own model. Experts whose output is 1% off reach 2e-4 to 5e-4,
a router without a gradient 6e-3, router weights rounded to bfloat16 only 1e-4: errors as small are the conformance
suite's to find.
"""


class DemoError(MoeBackendError, RuntimeError):
    """The demonstration cannot be run as asked."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a demonstration is asked to do.

    `model` is a checkpoint or a Hub id, None for the small model of `inputs.save_model`; `text` a file, None for
    Python's documentation. `batch` is in sequences, `sequence` in tokens. `output` is a new folder for the trained
    checkpoint, None to drop it.
    """

    backend: BackendConfig
    model: str | None = None
    text: Path | None = None
    steps: int = 40
    batch: int = 4
    sequence: int = 256
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    output: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was measured. `runs` are stock eager, the chosen backends and, where it can run, stock grouped_mm.

    `parameters` counts the model's. `differences` are the relative differences of each run's losses from stock eager's,
    step by step. `failures` are empty when everything that was claimed holds.
    """

    job: Job
    plan: str
    corpus: Corpus
    parameters: int
    runs: tuple[Run, ...]
    reload: roundtrip.Reload
    notes: tuple[str, ...]
    failures: tuple[str, ...]

    @property
    def differences(self) -> dict[str, list[float]]:
        eager = self.runs[0].losses
        return {run.label: relative(run.losses, eager) for run in self.runs[1:]}

    def to_dict(self) -> dict[str, Any]:
        """For `demo --json`: plain numbers, strings and lists. Times in seconds, memory in bytes."""
        job = {field.name: getattr(self.job, field.name) for field in fields(self.job)}
        job["backend"] = self.job.backend.to_dict()
        job |= {name: str(path) for name, path in job.items() if isinstance(path, Path)}
        return {
            "schema": 1,
            "job": job,
            "plan": self.plan,
            "corpus": asdict(self.corpus),
            "parameters": self.parameters,
            "runs": [asdict(run) | {"step_seconds": run.step_seconds} for run in self.runs],
            "differences": self.differences,
            "judged_steps": JUDGED_STEPS,
            "limit": LIMIT,
            "reload": asdict(self.reload),
            "notes": list(self.notes),
            "failures": list(self.failures),
        }


class Observer(Protocol):
    """Who is told how a demonstration goes."""

    def planned(self, job: Job, plan: Plan, parameters: int, corpus: Corpus) -> None:
        """Everything is checked and training begins."""

    def stepped(self, side: Side, step: int, loss: float) -> None:
        """A side has done `step` steps (from 1)."""

    def skipped(self, note: str) -> None:
        """A side that is not needed cannot run."""

    def finished(self, report: Report) -> None:
        """All is measured."""


def run(job: Job, observer: Observer) -> Report:
    """Train every side, compare the losses, reload what was trained.

    Raises:
        MoeBackendError: the job cannot be run as asked; raised before the first step where that can be known.
    """
    if job.output is not None and job.output.exists() and (not job.output.is_dir() or any(job.output.iterdir())):
        raise DemoError(f"--output {job.output} exists and is not an empty folder; name a new one")
    with tempfile.TemporaryDirectory(prefix="hf-moe-backends-demo-") as scratch:
        work = Path(scratch)
        model = job.model
        if model is None:
            model = str(inputs.save_model(work / "initial", seed=job.seed))
        explanation = explain(model, job.backend, device=job.device, dtype=job.dtype)
        config: Any = explanation.plan.model.config
        vocabulary = config.get_text_config().vocab_size
        corpus = inputs.save_batches(
            work / "batches.pt",
            text=job.text,
            model=job.model,
            vocabulary=vocabulary,
            shape=(job.steps, job.batch, job.sequence),
            seed=job.seed,
        )
        observer.planned(job, explanation.plan, explanation.parameters, corpus)

        trained = job.output if job.output is not None else work / "trained"
        runs, notes = [], []
        for side in (
            Side(label="stock eager", experts="eager"),
            Side(label=CHOSEN, backend=job.backend, save_to=trained),
            Side(label="stock grouped_mm", experts="grouped_mm"),
        ):
            result = train(side, model=model, work=work, job=job, stepped=observer.stepped)
            if isinstance(result, Run):
                runs.append(result)
            elif side.experts == "grouped_mm":
                notes.append(f"no control run: {result}")
                observer.skipped(notes[-1])
            else:
                raise DemoError(f"{side.label} failed: {result}")
        reload = roundtrip.reload(trained, work, device=job.device)
        report = Report(
            job=job,
            plan=str(explanation.plan),
            corpus=corpus,
            parameters=explanation.parameters,
            runs=tuple(runs),
            reload=reload,
            notes=tuple(notes),
            failures=tuple(failures(job, runs, reload)),
        )
        observer.finished(report)
        return report


def relative(losses: list[float], reference: list[float]) -> list[float]:
    """|a - b| / |b| for each step."""
    return [abs(loss - expected) / abs(expected) for loss, expected in zip(losses, reference, strict=True)]


def failures(job: Job, runs: list[Run], reload: roundtrip.Reload) -> list[str]:
    """What does not hold of what the demonstration claims, in words."""
    found = []
    eager, chosen, *control = runs
    differences = relative(chosen.losses, eager.losses)[:JUDGED_STEPS]
    # bfloat16 rounds the router's scores, and a flipped choice of experts parts two correct runs at once
    if job.dtype == "float32" and not all(difference <= LIMIT for difference in differences):  # NaN is no agreement
        step = next(i for i, difference in enumerate(differences) if not difference <= LIMIT)
        message = (
            f"the losses part from stock eager's by {differences[step]:.1e} at step {step + 1} "
            f"({chosen.losses[step]:.6f}, eager {eager.losses[step]:.6f}); the limit over the first {JUDGED_STEPS} "
            f"steps is {LIMIT:.0e}."
        )
        stock = relative(control[0].losses, eager.losses)[: step + 1] if control else []
        if any(difference > LIMIT / 10 for difference in stock):
            message += (
                f" {control[0].label} parts from it by up to {max(stock):.1e} until then, so that this run cannot tell "
                "a wrong backend from a router's choice that rounding flipped: try another --seed or --text."
            )
        elif stock:
            message += (
                f" {control[0].label} stays within {max(stock):.1e} until then: the chosen backends do not compute "
                "what stock code computes."
            )
        found.append(message)
    if not reload.equal:
        found.append(
            "the reloaded checkpoint gives other logits than the model that was saved: they differ by up to "
            f"{reload.greatest_difference:.3g}"
        )
    if reload.imported:
        found.append("the process that reloaded the checkpoint had imported hf_moe_backends, so it shows nothing")
    return found
