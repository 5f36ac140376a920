"""Models under DDP, FSDP and ZeRO-3: what becomes of each kind set before and after. Run by `test_situations.py`.

One process a rank, with RANK, WORLD_SIZE and, on rank 0, the report's path:

    RANK=0 WORLD_SIZE=2 python situations_ranks.py STORE REPORT ddp fsdp1 ...
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from hf_moe_conformance import zoo
from situations_backends import CALLS, KINDS, install_toys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel

from hf_moe_backends import (
    BackendConfig,
    MoeBackendError,
    get_moe_backend,
    moe_backend,
    reset_moe_backend,
    set_moe_backend,
)

LEARNING_RATE = 0.1


def losses(model: Any, ids: torch.Tensor, optimizer: Any) -> list[float]:
    """The loss before and after one step of SGD, which tells of gradients whatever they were sharded into."""
    found = []
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids).loss
        found.append(loss.item())
        if isinstance(optimizer, str):  # DeepSpeed's engine steps itself
            model.backward(loss)
            model.step()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return found


def ddp(model: Any) -> Any:
    return DistributedDataParallel(model)


def fsdp1(model: Any, *, layers: bool, use_orig_params: bool) -> Any:
    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={type(model.model.layers[0])})
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy if layers else None,
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )


def fsdp2(model: Any, *, layers: bool) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers if layers else ():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def zero3(model: Any) -> Any:
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
        },
    )
    return engine


WRAPS: dict[str, Callable[[Any], Any]] = {
    "ddp": ddp,
    "fsdp1": partial(fsdp1, layers=False, use_orig_params=False),
    "fsdp1-layers": partial(fsdp1, layers=True, use_orig_params=True),
    "fsdp2": partial(fsdp2, layers=False),
    "fsdp2-layers": partial(fsdp2, layers=True),
    "zero3": zero3,
}


def wrapped(name: str, model: Any, ids: torch.Tensor) -> tuple[Any, Any]:
    """The model under its wrapper, after a forward: `fully_shard` leaves the root's parameters whole after one."""
    wrapper = WRAPS[name](model)
    optimizer = "engine" if name == "zero3" else torch.optim.SGD(wrapper.parameters(), lr=LEARNING_RATE)
    with torch.no_grad():
        wrapper(input_ids=ids)
    return wrapper, optimizer


def situation(name: str, kind: str, when: str, ids: torch.Tensor) -> dict[str, Any]:
    """One kind set before or after wrapping, one training step, and a reset."""
    config = BackendConfig(**{kind: "toy"})
    row: dict[str, Any] = {"wrap": name, "kind": kind, "when": when}
    model = zoo.build("qwen3_moe")
    try:
        if when == "before":
            set_moe_backend(model, config)
        model, optimizer = wrapped(name, model, ids)
        CALLS.clear()
        if when == "after":
            set_moe_backend(model, config)
        row["set"] = "works"
    except MoeBackendError as error:
        row["set"] = f"{type(error).__name__}: {error}"
    row["in force"] = get_moe_backend(model) == config
    row["losses"] = losses(model, ids, optimizer)
    row["calls"] = CALLS.count(kind)
    try:
        reset_moe_backend(model)
        row["reset"] = "works"
    except MoeBackendError as error:
        row["reset"] = f"{type(error).__name__}: {error}"
    CALLS.clear()
    with torch.no_grad():
        row["loss after reset"] = model(input_ids=ids, labels=ids).loss.item()
    row["calls after reset"] = CALLS.count(kind)
    if kind == "experts":
        with moe_backend(model, BackendConfig(experts="loop")):
            row["context"] = get_moe_backend(model).experts
    return row


def stock(name: str, ids: torch.Tensor) -> dict[str, Any]:
    model, optimizer = wrapped(name, zoo.build("qwen3_moe"), ids)
    found = losses(model, ids, optimizer)
    with torch.no_grad():
        return {"wrap": name, "kind": None, "losses": found, "last": model(input_ids=ids, labels=ids).loss.item()}


def rows(names: list[str], ids: torch.Tensor) -> Iterator[dict[str, Any]]:
    for name in names:
        yield stock(name, ids)
        for kind in KINDS:
            for when in ("before", "after"):
                yield situation(name, kind, when, ids)


def main(store: str, report: str, *names: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    install_toys()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    if "zero3" in names:
        import deepspeed

        deepspeed.init_distributed("gloo")
    ids = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(rank))
    found = list(rows(list(names), ids))
    if rank == 0:
        Path(report).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
