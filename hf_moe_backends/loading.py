"""`from_pretrained(..., ep_size=8)`: the `DistributedConfig` that the installed Transformers shards a model by."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
import transformers
from packaging.version import Version

from hf_moe_backends.errors import ConfigError

SIZES = ("ep_size", "fsdp_size", "tp_size")


def take_sizes(kwargs: dict[str, Any]) -> None:
    """Replace `ep_size`, `fsdp_size` and `tp_size` among the arguments of `from_pretrained` by a `distributed_config`.

    Without the first two nothing is done: `tp_size` alone is Transformers' own argument.

    Raises:
        ConfigError: the sizes do not fit each other, the number of processes or the installed Transformers.
    """
    if kwargs.get("ep_size") is None and kwargs.get("fsdp_size") is None:
        for name in ("ep_size", "fsdp_size"):
            kwargs.pop(name, None)
        return
    for name in ("distributed_config", "device_map", "tp_plan"):
        if kwargs.get(name) is not None:
            raise ConfigError(
                f"{name}= and ep_size= or fsdp_size= both say where parameters go. Give one of them"
                + (
                    ""
                    if name == "device_map"
                    else ": distributed_config=DistributedConfig(...) takes the sizes as well"
                )
            )
    sizes = {name: kwargs.pop(name, None) for name in SIZES}
    kwargs["distributed_config"] = distributed_config(**sizes)


def distributed_config(
    ep_size: int | None = None, fsdp_size: int | None = None, tp_size: int | None = None, world: int | None = None
) -> Any:
    """Transformers' `DistributedConfig` for these sizes.

    Args:
        ep_size: ranks that have all experts together. Default: 1.
        fsdp_size: ranks that have a batch each. Default: as many as `tp_size` leaves.
        tp_size: ranks that share a batch. Default: 1. Before 5.19 their dense parameters stay whole.
        world: the number of processes. Default: that of the process group, or what torchrun says.

    Raises:
        ConfigError: they do not fit each other, the number of processes or the installed Transformers.
    """
    from transformers.distributed import DistributedConfig

    given = {"ep_size": ep_size, "fsdp_size": fsdp_size, "tp_size": tp_size}
    for name, size in given.items():
        if size is not None and (type(size) is not int or size < 1):
            raise ConfigError(f"{name}={size!r} must be an int of at least 1")
    if world is None:
        world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    ep, tp = ep_size or 1, tp_size or 1
    fsdp = max(1, world // tp) if fsdp_size is None else fsdp_size
    asked = ", ".join(f"{name}={size}" for name, size in given.items() if size is not None)
    needed = fsdp * tp if fsdp_size is not None else max(ep, tp, world // tp * tp)
    if needed != world:
        raise ConfigError(
            f"{asked} is for {needed} processes (fsdp_size * tp_size), and there {_are(world)}. Start as many: "
            f"torchrun --nproc-per-node {needed} YOUR_SCRIPT.py (with --nnodes, the processes a node)"
        )
    if ep % tp and ep > 1:
        raise ConfigError(f"{asked}: ep_size must be a multiple of tp_size={tp}")
    if fsdp * tp % ep:
        raise ConfigError(f"{asked}: ep_size must divide fsdp_size * tp_size = {fsdp * tp}, the number of processes")
    version = Version(transformers.__version__)
    newer = "pip install 'transformers>=5.23,<5.25'"
    if version < Version("5.19"):
        if fsdp > 1:
            raise ConfigError(
                f"{asked}: Transformers {version} shards experts only over ranks that share a batch. Use "
                f"tp_size={world}, fsdp_size=1, ep_size={world}, or {newer}"
            )
        return DistributedConfig(tp_size=tp, enable_expert_parallel=ep > 1)
    if version < Version("5.20") and ep > 1 and ep != tp:
        raise ConfigError(f"{asked}: Transformers {version} has ep_size == tp_size only. For more, {newer}")
    if version < Version("5.23") and ep > 1 and fsdp > 1 and ep == fsdp * tp:
        raise ConfigError(
            f"{asked}: Transformers {version} makes the experts' gradients {fsdp} times too small where "
            f"ep_size == fsdp_size * tp_size. Use a smaller ep_size, or {newer}. For inference alone, "
            "distributed_config=DistributedConfig(...) is not checked"
        )
    return DistributedConfig(ep_size=ep, fsdp_size=fsdp, tp_size=tp)


def _are(count: int) -> str:
    return "is 1" if count == 1 else f"are {count}"
