"""The norm of gradients that are sharded over different meshes: dense parameters over one, experts over another."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients down, in place, so that the norm of all of them together is at most `max_norm`.

    As `torch.nn.utils.clip_grad_norm_`, which takes no gradients of different meshes. Every rank must call it with the
    same parameters in the same order; one without a gradient counts as zero. Gradients that are plain tensors must be
    the same on all ranks. The norm is taken in float32, in float64 if any parameter is, and nothing
    waits for the device.

    Args:
        norm_type: at least 1; `math.inf` for the largest absolute value.

    Returns:
        The norm before, a scalar, the same on every rank.

    Raises:
        RuntimeError: the norm is not finite, with `error_if_nonfinite`, which waits for the device.
    """
    if not norm_type >= 1:
        raise ValueError(f"norm_type={norm_type} must be at least 1")
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not parameters:
        return torch.zeros(())
    largest = math.isinf(norm_type)
    device = parameters[0].device
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
    shards: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        # by the parameter, whose placements are its gradient's: a rank that has no gradient joins the sum all the same
        here = shards[_split_over(parameter)]
        if parameter.grad is not None:
            here.append(_own(parameter.grad))
    totals = []
    for groups, tensors in shards.items():
        filled = [t for t in tensors if t.numel()]
        total = torch.zeros((), device=device, dtype=dtype)
        if filled:
            norms = torch.stack([n.to(device) for n in torch._foreach_norm(filled, norm_type, dtype=dtype)])
            total = norms.max() if largest else norms.pow(norm_type).sum()
        for group in groups:
            dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        totals.append(total)
    every = torch.stack(totals)
    norm = every.max() if largest else every.sum().pow(1 / norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"the norm of the gradients is {norm.item()}, so that they cannot be clipped")
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    by_device: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensors in shards.values():
        for t in tensors:
            by_device[t.device, t.dtype].append(t)
    for (where, _), tensors in by_device.items():
        torch._foreach_mul_(tensors, scale.to(where))
    return norm


def _split_over(parameter: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The process groups whose ranks hold different parts of a parameter."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    return tuple(
        mesh.get_group(dim)
        for dim, placement in enumerate(parameter.placements)
        if not isinstance(placement, (Replicate, Partial))
    )


def _own(gradient: Tensor) -> Tensor:
    """This rank's part of it, to be changed in place."""
    if not isinstance(gradient, DTensor):
        return gradient
    if any(isinstance(placement, Partial) for placement in gradient.placements):
        raise ValueError("a gradient is not summed over its ranks yet (its placement is Partial)")
    return gradient.to_local()
