"""One view of every experts layout, so that a backend is written once.

E experts, H hidden size, I intermediate size, N = 2I for gated experts and I for others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn


class Weights(NamedTuple):
    """An experts module's weights as they are stored."""

    up: Tensor  # (E, N, H), transposed (E, H, N)
    up_bias: Tensor | None  # (E, N)
    down: Tensor  # (E, H, I), transposed (E, I, H)
    down_bias: Tensor | None  # (E, H)
    transposed: bool


def read_weights(experts: nn.Module) -> Weights:
    """Read the weights once: under a LoRA parametrization each access computes all experts' weights anew."""
    module: Any = experts
    name = "gate_up_proj" if module.has_gate else "up_proj"
    up, down = getattr(module, name), module.down_proj
    if not module.has_bias:
        return Weights(up, None, down, None, module.is_transposed)
    return Weights(up, getattr(module, f"{name}_bias"), down, module.down_proj_bias, module.is_transposed)


def activate(experts: nn.Module, pre: Tensor) -> Tensor:
    """The module's own gate or activation: pre-activation (R, N) -> (R, I), in the same dtype."""
    module: Any = experts
    out: Tensor = module._apply_gate(pre) if module.has_gate else module.act_fn(pre)
    return out.to(pre.dtype)  # some compute in float32


def finish(experts: nn.Module, rows: Tensor) -> Tensor:
    """The module's norm on each expert's output (R, H), where it has one (Transformers 5.20 on)."""
    module: Any = experts
    if getattr(module, "has_post_expert_norm", False):
        rows = module.post_expert_norm(rows)
    return rows
