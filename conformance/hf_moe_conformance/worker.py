"""The process that cells run in, so that a hang, a crash or an exit of a backend ends that process and not the run.

The parent gives a worker the subject and the names of the cells to run, and reads one line of JSON when a cell starts
and one when it ends, from a pipe of their own: a backend may print what it likes. A worker watches itself with
`faulthandler`, whose watchdog needs neither the GIL nor a Python thread, and so sees a kernel that never returns. When
a worker ends early, the cell that it was in gets the error, and a new worker goes on with the next.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import IO, Any

from hf_moe_conformance.check import TIERS, Cell
from hf_moe_conformance.measures import Measure
from hf_moe_conformance.result import Result
from hf_moe_conformance.runner import InProcess, cells_of, missing_result
from hf_moe_conformance.subject import Subject

START_UP = 120.0
"""Seconds that a worker may take to import torch, Transformers and the backend before its first cell starts."""


def run_in_workers(subject: Subject, cells: Sequence[Cell], timeout: float) -> Iterator[Result]:
    """One result a cell, in order, from as many workers as it takes."""
    left = list(cells)
    while left:
        done = 0
        for result in _run_worker(subject, left, timeout):
            done += 1
            yield result
        if done == 0:
            raise RuntimeError("a worker ended without a result or an error")  # else this would go on for ever
        left = left[done:]


def _run_worker(subject: Subject, cells: Sequence[Cell], timeout: float) -> Iterator[Result]:
    """Results of the first cells, up to and including the one in which the worker ends."""
    job = {
        "kind": subject.kind,
        "name": subject.name,
        "options": dict(subject.options),
        "device": subject.device,
        "dtypes": subject.dtypes,
        "seed": subject.seed,
        "cells": [cell.name for cell in cells],
        "timeout": timeout,
    }
    read, write = os.pipe()
    with tempfile.TemporaryFile("w+") as log, os.fdopen(read) as pipe:
        process = subprocess.Popen(
            [sys.executable, "-m", "hf_moe_conformance.worker", str(write)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=(write,),
            text=True,
        )
        os.close(write)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:  # it died: its exit code says more
            process.stdin.write(json.dumps(job))
        try:
            ended, started = 0, False
            start = time.perf_counter()
            for line in pipe:  # ends when the worker does, however it ends
                said = json.loads(line)
                if "started" in said:
                    start, started = time.perf_counter(), True
                else:
                    ended += 1
                    yield _result(said)
            process.wait()
            if ended < len(cells) and process.returncode != RETIRED:
                message = f"{_death(process.returncode, timeout)}{_tail(log)}"
                # one that never came to its first cell would not come to the others either
                for cell in cells[ended : ended + 1] if started else cells:
                    yield missing_result(cell, message, time.perf_counter() - start)
        finally:
            process.kill()
            process.wait()


RETIRED = 64
"""The exit code of a worker that gives up its place after a result, because its device can no longer be trusted."""


def _result(message: dict[str, Any]) -> Result:
    widened = tuple(Measure(**m) for m in message.pop("widened"))
    result = Result.from_dict(message)
    return Result(**{**vars(result), "widened": widened})


def _death(code: int, timeout: float) -> str:
    if code == 1:
        return f"no result within {timeout:g} s, or the worker could not start"
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process exited with {code}"


def _tail(log: IO[str], lines: int = 25) -> str:
    """The end of what the worker printed: the stacks that faulthandler wrote are there."""
    log.seek(0)
    found = log.read().strip().splitlines()[-lines:]
    return "\n" + "\n".join(found) if found else ""


def main() -> None:
    job = json.load(sys.stdin)
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as pipe:
        faulthandler.enable()
        faulthandler.dump_traceback_later(START_UP, exit=True)
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        # The sizes are too small to share. Beside other work on a machine, waiting threads cost twenty times that.
        torch.set_num_threads(1)
        subject = Subject.find(
            job["kind"],
            job["name"],
            options=job["options"],
            device=job["device"],
            dtypes=job["dtypes"],
            seed=job["seed"],
        )
        known = {cell.name: cell for cell in cells_of(subject, tiers=TIERS)}
        here = InProcess(subject)
        for name in job["cells"]:
            print(json.dumps({"started": name}), file=pipe)
            faulthandler.dump_traceback_later(job["timeout"], exit=True)
            result = here.run(known[name])
            faulthandler.cancel_dump_traceback_later()
            print(json.dumps(result.to_dict() | {"widened": [asdict(m) for m in result.widened]}), file=pipe)
            # an illegal access is reported by every later call on that device in the process
            if result.status == "error" and subject.device == "cuda":
                try:
                    torch.cuda.synchronize()
                except RuntimeError:
                    sys.exit(RETIRED)


if __name__ == "__main__":
    main()
