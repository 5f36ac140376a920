"""A plugin of toy backends that compute what stock computes and count their calls, for `test_situations.py`.

It is a module of its own because a pickled model names its backends' code by import path.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_moe_backends import AttentionBackend, BackendSpec, Capabilities, discovery, hookimpl, registry
from hf_moe_backends.builtin.experts.loop import loop
from hf_moe_backends.spec import FEATURES

KINDS = ("experts", "attn", "linear", "norm", "loss")

CALLS: list[str] = []
"""The name of every backend called, in order. A list, since Dynamo replays appends to one."""


class ToyLinear(nn.Linear):
    """The same product, on the Parameters of another linear. Allocates nothing."""

    def forward(self, input: Tensor) -> Tensor:
        CALLS.append("linear")
        return F.linear(input, self.weight, self.bias)


class ToyNorm(nn.Module):
    """An RMSNorm, with the rounding of Llama's."""

    def forward(self, x: Tensor) -> Tensor:
        CALLS.append("norm")
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def toy_linear(linear: nn.Linear) -> nn.Module:
    new = ToyLinear.__new__(ToyLinear)
    nn.Module.__init__(new)
    new.in_features, new.out_features = linear.in_features, linear.out_features
    new.weight, new.bias = linear.weight, linear.bias
    return new


def toy_norm(norm: nn.Module) -> nn.Module:
    new = ToyNorm()
    new.weight, new.eps = norm.weight, norm.variance_epsilon
    return new


def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    CALLS.append("attn")
    return sdpa_attention_forward(module, *args, **kwargs)


toy_attention = AttentionBackend(attention=attention, mask="sdpa")


def toy_loss(*args: Any, **kwargs: Any) -> Tensor:
    CALLS.append("loss")
    return ForCausalLMLoss(*args, **kwargs)


def toy_experts(*args: Any) -> Tensor:
    CALLS.append("experts")
    return loop(*args)


@hookimpl
def hf_moe_backends_register() -> list[BackendSpec]:
    targets = {
        "experts": "toy_experts",
        "attn": "toy_attention",
        "linear": "toy_linear",
        "norm": "toy_norm",
        "loss": "toy_loss",
    }
    specs = []
    for kind, target in targets.items():
        features = frozenset(FEATURES[kind]) - {"layer_norm", "custom", "zero_centred", "unweighted"}
        specs.append(
            BackendSpec(
                kind=kind,  # type: ignore[arg-type]
                name="toy",
                target=f"situations_backends:{target}",
                capabilities=Capabilities(features=features),
                priority=-100,
            )
        )
    return specs


def install_toys() -> None:
    """Make this process's registry one of the installed backends and the toys, read as any plugin is."""
    toys = discovery._read("situations-toys", "1.0", "toys", lambda: sys.modules[__name__])
    registry._registry = registry.Registry([*discovery.discover(), toys])


@contextmanager
def counted(name: str) -> Iterator[None]:
    """A registered experts backend counts its calls as the toys do."""
    function = ALL_EXPERTS_FUNCTIONS._global_mapping[name]

    def counting(*args: Any) -> Tensor:
        CALLS.append("experts")
        return function(*args)

    ALL_EXPERTS_FUNCTIONS._global_mapping[name] = counting
    try:
        yield
    finally:
        ALL_EXPERTS_FUNCTIONS._global_mapping[name] = function
