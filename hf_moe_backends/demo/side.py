"""One side of the demonstration, trained in a process of its own, so that its time and its peak memory are its own."""

from __future__ import annotations

import multiprocessing
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_moe_backends.api import reset_moe_backend, set_moe_backend
from hf_moe_backends.config import BackendConfig
from hf_moe_backends.demo import roundtrip
from hf_moe_backends.errors import MoeBackendError
from hf_moe_backends.survey import survey

if TYPE_CHECKING:
    from hf_moe_backends.demo import Job

CHOSEN = "chosen backends"
RATE = 1e-4
"""AdamW's rate: one for fine-tuning, also because two correct runs stay together at it.

Rounding flips a router's choice where two scores are near a tie, and AdamW scales the few weights that feel it up to
whole steps. After a flip in the first step of a model like the demo's, stock grouped_mm was apart from stock eager by
8e-6 (relative) at step 20 at this rate, by 4e-5 at twice and by 2e-2 at ten times this rate.
"""
WARM_UP = 10
"""Steps over which the rate rises to `RATE`: AdamW's first steps go by the gradient's sign, be it of rounding noise."""
CLIP = 1.0
"""The greatest norm of the gradients, as Transformers' Trainer has it."""
_UNTIMED = 3
"""First steps that warm caches and compile kernels."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """What one side runs on: a stock experts implementation by Transformers' own setter, or a backend config.

    `save_to` is where the trained model goes, with its backends in force.
    """

    label: str
    experts: str | None = None
    backend: BackendConfig | None = None
    save_to: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one side measured.

    `losses` and `seconds` have one entry a step. `peak_bytes` are, on CUDA, the most that torch had allocated; on a
    CPU, the weights and the growth of the process's resident memory while it trained, None where the system does not
    tell (it is read from /proc).
    """

    label: str
    losses: list[float]
    seconds: list[float]
    peak_bytes: int | None

    @property
    def step_seconds(self) -> float:
        """The median step after the first ones."""
        return statistics.median(self.seconds[_UNTIMED:] or self.seconds)


def train(side: Side, *, model: str, work: Path, job: Job, stepped: Callable[[Side, int, float], None]) -> Run | str:
    """Train one side in a new process and wait for it. Returns what it measured, or why it could not.

    Raises:
        MoeBackendError: as it was raised there.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(there, side, model, work, job), daemon=True)
    process.start()
    there.close()  # this process's copy, so that the pipe ends with the other process
    try:
        while True:
            message = here.recv()
            if isinstance(message, tuple):
                stepped(side, *message)
            elif isinstance(message, MoeBackendError):
                raise message
            else:
                return message  # type: ignore[no-any-return]
    except EOFError:
        process.join()
        killed = ", as a system does that is out of memory" if process.exitcode == -9 else ""
        return f"its process ended with code {process.exitcode}{killed}"
    finally:
        process.kill()
        process.join()


def _main(connection: Connection, side: Side, model: str, work: Path, job: Job) -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        connection.send(_train(connection, side, model, work, job))
    except MoeBackendError as error:
        connection.send(error)
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")


def _train(connection: Connection, side: Side, path: str, work: Path, job: Job) -> Run | str:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, job.dtype)).to(job.device)
    model.train()
    if side.backend is not None:
        set_moe_backend(model, side.backend)
    elif reason := _set_stock(model, side.experts):
        return reason
    batches = torch.load(work / "batches.pt").to(job.device)
    torch.manual_seed(job.seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, (step + 1) / WARM_UP))

    memory = _Memory(job.device)
    losses, seconds = [], []
    for step, ids in enumerate(batches, start=1):
        begin = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
        losses.append(loss.item())  # waits for a device
        seconds.append(time.perf_counter() - begin)
        connection.send((step, losses[-1]))
    peak = memory.peak(model)

    if side.save_to is not None:
        model.save_pretrained(side.save_to)
        reset_moe_backend(model)
        _set_stock(model, "eager")
        roundtrip.save_expected(model, batches[0], work)
    return Run(label=side.label, losses=losses, seconds=seconds, peak_bytes=peak)


def _set_stock(model: Any, experts: str | None) -> str | None:
    """Stock code by Transformers' own setter, or why this model has none of that name."""
    if experts is None:
        return None
    sites = survey(model)["experts"]
    own = next((s for s in sites if s.demand.blocked or "late_dispatch" in s.demand.features), None)
    if sites and own is None:
        model.set_experts_implementation(experts)
    elif experts != "eager":  # what such a model has of its own stands for eager; the setter would do nothing, silently
        return f"Transformers does not dispatch {type(own.module).__name__}" if own else "this model has no experts"
    return None


class _Memory:
    """The memory of this process from now on."""

    def __init__(self, device: str):
        self.cuda = device == "cuda"
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            self.before = _resident("VmRSS")

    def peak(self, model: nn.Module) -> int | None:
        if self.cuda:
            return torch.cuda.max_memory_allocated()
        highest = _resident("VmHWM")
        if self.before is None or highest is None:
            return None
        weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        return weights + highest - self.before


def _resident(field: str) -> int | None:
    """A field of /proc/self/status in bytes. getrusage's figure is no use: a child begins with its parent's peak."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return 1024 * int(value.split()[0])
    return None
