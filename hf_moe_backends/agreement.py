"""One decision on many ranks: made on all of them, the same everywhere, or nowhere."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from hf_moe_backends.builtin.dispatch.collectives import cpu_group
from hf_moe_backends.errors import RanksDisagree
from hf_moe_backends.expert_parallel import sharded

T = TypeVar("T")

PATIENCE = datetime.timedelta(minutes=5)
"""How long a rank waits for another: they read checkpoints at different speeds. One that is dead is noticed at once."""

_LENGTH = 16384
"""Bytes of a rank's word, whose texts are cut so that they fit: JSON writes a character in up to 6."""


def expert_group(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that have a model's experts together, or None where this one has all of them."""
    for module in model.modules():
        found = sharded(module)
        if found is not None and found.ep_mesh.size() > 1:
            return found.ep_mesh.get_group()
    return None


def on_all(group: dist.ProcessGroup, step: Callable[[], T], describe: Callable[[T], dict[str, str]]) -> T:
    """Do a step that every rank of the group does, and return what it returned.

    Raises:
        RanksDisagree: another rank could not, or what it did is described otherwise, or it did not come here.
        Exception: this rank's own.
    """
    try:
        result = step()
        did = describe(result)
    except Exception as error:
        with contextlib.suppress(RanksDisagree):  # this rank's own error says more
            _tell(group, {"failed": f"{type(error).__name__}: {error}"[:2000]})
        raise
    mine: dict[str, Any] = {"did": {key: text[:200] for key, text in did.items()}, "digest": _digest(did)}
    theirs = _tell(group, mine)
    failed = {rank: word["failed"] for rank, word in theirs.items() if "failed" in word}
    if failed:
        rank, why = next(iter(failed.items()))
        raise RanksDisagree(f"{_ranks(failed)} failed, so that no rank has changed its model. On rank {rank}: {why}")
    other = {rank: word["did"] for rank, word in theirs.items() if word["digest"] != mine["digest"]}
    if other:
        rank, its = next(iter(other.items()))
        differ = [key for key in did | its if its.get(key) != mine["did"].get(key)]
        here = ", ".join(f"{key}: {mine['did'].get(key, 'as it is')}" for key in differ)
        there = ", ".join(f"{key}: {its.get(key, 'as it is')}" for key in differ)
        raise RanksDisagree(
            f"ranks that have the experts together must run on the same, and {_ranks(other)} differ from rank "
            f"{dist.get_rank()}, so that none of them has changed its model. Rank {dist.get_rank()} has {here}; "
            f"rank {rank} has {there}"
        )
    return result


def _digest(did: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(did, sort_keys=True).encode()).hexdigest()


def _ranks(ranks: Any) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def _tell(group: dist.ProcessGroup, word: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """This rank's word to the others, and theirs, by global rank.

    From each to each, so that one that does not come can be named.
    """
    group = cpu_group(group)
    me, ranks = dist.get_rank(), dist.get_process_group_ranks(group)
    mine = _packed(word)
    theirs = {rank: torch.empty_like(mine) for rank in ranks if rank != me}
    sent = [dist.isend(mine, rank, group=group) for rank in theirs]
    coming = {rank: dist.irecv(into, rank, group=group) for rank, into in theirs.items()}
    missing = {}
    for rank, work in coming.items():
        try:
            assert work is not None  # as on a rank outside of the group
            work.wait(PATIENCE)
        except (RuntimeError, ValueError) as error:
            missing[rank] = str(error)
    if missing:
        raise RanksDisagree(
            f"{_ranks(missing)} did not set the same backends within {PATIENCE.total_seconds():.0f} s. Every rank that "
            f"shares experts must, or it has died: {next(iter(missing.values())).splitlines()[0]}"
        )
    for sending in sent:
        assert sending is not None
        sending.wait(PATIENCE)
    return {rank: _unpacked(received) for rank, received in theirs.items()}


def _packed(word: dict[str, Any]) -> torch.Tensor:
    text = json.dumps(word).encode()
    assert len(text) <= _LENGTH
    return torch.tensor(list(text.ljust(_LENGTH)), dtype=torch.uint8)


def _unpacked(word: torch.Tensor) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bytes(word.tolist()))
    return found
