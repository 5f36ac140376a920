"""Processes that run one function on every rank of a world, and say which rank hung, died or raised.

A world is started once and runs any number of functions. It ends with the first rank that does not return: what is in
flight between the ranks then cannot be told. The next one to ask for a world of that size gets a new one.

Ranks are forked from one server process that has imported torch and Transformers once (multiprocessing's forkserver),
so that a new world costs a fork and a rendezvous and not an import on every rank. The server itself computes nothing
and never touches a GPU.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import math
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

START_UP = 60.0
"""Seconds that a world may take to be there: the server's imports are among them."""

DEADLINE = 55.0
"""Seconds that one function may take on all ranks. With `START_UP` less than the runner's default for a cell."""

LAG = 15.0
"""Seconds that the other ranks have once one has returned, raised or died. They meet in every collective, so that none
is long behind another."""

_PRELOADED = [
    "hf_moe_conformance.ranks",
    "hf_moe_conformance.checks.dispatcher_ranks",
    "transformers.modeling_utils",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.gpt_oss.modeling_gpt_oss",
]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a function ended on one rank: it returned, raised, the process died, or neither in the time it had.

    Attributes:
        value: what it returned.
        text: the traceback, or what the process last printed, which in a hang is its stack.
        after: seconds after it was called.
    """

    how: Literal["returned", "raised", "died", "hung"]
    value: Any = None
    text: str = ""
    after: float = math.inf


class RankError(RuntimeError):
    """A rank did not return."""


class World:
    """As many processes as there are ranks, joined in one process group: gloo on the CPU, nccl on GPUs."""

    def __init__(self, device: str, size: int):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="hf-moe-ranks-")
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank, args=(theirs, rank, size, device, self._folder.name), name=f"rank {rank}", daemon=True
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        _require_returned(self._collect(START_UP))

    @property
    def alive(self) -> bool:
        return bool(self._processes)

    def run(self, function: Callable[..., T], arguments: Sequence[tuple[Any, ...]]) -> list[T]:
        """Call a function of a module on every rank, each with its own arguments, and return what each returned.

        Raises:
            RankError: it did not return on all ranks. It names the rank that went first, with its stack.
        """
        return _require_returned(self.attempt(function, arguments))

    def attempt(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Ended]:
        """The same, and how it ended on each rank whatever happens."""
        for connection, given in zip(self._connections, arguments, strict=True):
            with contextlib.suppress(OSError):  # it died: the next read says so
                # not `send`, whose pickler would hand tensors over as file descriptors
                connection.send_bytes(pickle.dumps((function, given)))
        return self._collect(DEADLINE)

    def close(self) -> None:
        """End all ranks."""
        for process in self._processes:
            process.kill()
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join()
            connection.close()
        self._processes, self._connections = [], []
        self._folder.cleanup()

    def _collect(self, deadline: float) -> list[Ended]:
        """One ending a rank. A world with one that did not return is closed."""
        ended: dict[int, Ended] = {}
        start = time.monotonic()
        end = start + deadline
        while len(ended) < self.size and (left := end - time.monotonic()) > 0:
            waiting: dict[Any, int] = {c: rank for rank, c in enumerate(self._connections) if rank not in ended}
            for connection in wait(list(waiting), timeout=left):
                ended[waiting[connection]] = self._receive(waiting[connection], time.monotonic() - start)
                end = min(end, time.monotonic() + LAG)
        hung = [rank for rank in range(self.size) if rank not in ended]
        for rank in hung:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)  # it writes its stacks to its log
        if hung:
            time.sleep(0.5)
        for rank in hung:
            ended[rank] = Ended(how="hung", text=self._log(rank))
        if any(e.how != "returned" for e in ended.values()):
            self.close()
        return [ended[rank] for rank in range(self.size)]

    def _receive(self, rank: int, after: float) -> Ended:
        try:
            how, value, text = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, OSError):
            self._processes[rank].join()
            code = self._processes[rank].exitcode or 0
            what = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
            return Ended(how="died", text=f"the process was {what}\n{self._log(rank)}", after=after)
        return Ended(how=how, value=value, text=text, after=after)

    def _log(self, rank: int, lines: int = 30) -> str:
        """The end of what the rank printed."""
        path = Path(self._folder.name) / f"{rank}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""


def _require_returned(ended: Sequence[Ended]) -> list[Any]:
    """What each returned.

    Raises:
        RankError: one did not.
    """
    bad = sorted((rank for rank, e in enumerate(ended) if e.how != "returned"), key=lambda rank: ended[rank].after)
    if bad:
        # ranks whose peer is gone raise or hang in their turn, so the first says most
        raise RankError("\n".join(f"rank {rank} of {len(ended)} {ended[rank].how}: {ended[rank].text}" for rank in bad))
    return [e.value for e in ended]


_worlds: dict[tuple[str, int], World] = {}


def world(device: str, size: int) -> World:
    """A world of this size, the one before where it is still alive."""
    found = _worlds.get((device, size))
    if found is None or not found.alive:
        found = _worlds[device, size] = World(device, size)
    return found


@atexit.register
def _close_all() -> None:
    for each in _worlds.values():
        each.close()
    _worlds.clear()


def _rank(connection: Connection, rank: int, size: int, device: str, folder: str) -> None:
    """The life of one rank. It ends when its parent does, in a hang as well: within a deadline of its own."""
    with open(Path(folder) / f"{rank}.log", "w", buffering=1) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size)
    )  # Transformers reads these
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # so that a log ends with what ended the process

    if device == "cuda":
        torch.cuda.set_device(rank)
    _here.device, _here.folder = device, folder
    _report(connection, rejoin, (), START_UP)
    while True:
        try:
            function, arguments = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        _report(connection, function, arguments, DEADLINE)


@dataclass
class _Here:
    """What a rank knows of its world."""

    device: str = ""
    folder: str = ""
    joined: int = 0  # process groups so far: each rendezvous needs a file of its own


_here = _Here()


def rejoin() -> None:
    """End all process groups of this rank and join a new one with the others. Every rank must call it.

    A sharded model makes a process group for each of its meshes, with threads and sockets that stay when it goes.
    """
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()
    _here.joined += 1
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "nccl" if _here.device == "cuda" else "gloo",
        init_method=f"file://{_here.folder}/store-{_here.joined}",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        device_id=torch.device("cuda", rank) if _here.device == "cuda" else None,
    )


def _report(connection: Connection, function: Callable[..., Any], arguments: tuple[Any, ...], deadline: float) -> None:
    """Call it and tell the parent how it ended. An exception ends the process, as it ends a script under torchrun."""
    faulthandler.dump_traceback_later(deadline + 2 * LAG, exit=True, file=2)  # where there is no parent any more
    try:
        message = pickle.dumps(("returned", function(*arguments), ""))
    except BaseException:
        connection.send_bytes(pickle.dumps(("raised", None, traceback.format_exc())))
        os._exit(1)
    faulthandler.cancel_dump_traceback_later()
    connection.send_bytes(message)
