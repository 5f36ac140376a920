"""All that undoing an edit must restore: the objects in a model, by identity, and the values in its configs."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

_CONTAINERS = ("_modules", "_parameters", "_buffers")

State = dict[str, dict[str, Any]]


def state(model: nn.Module) -> State:
    """A snapshot, to compare with `changes` later. It holds the objects, so that none of them can be mistaken."""
    found: State = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for attribute, value in vars(module).items():
            if attribute in _CONTAINERS:
                found[f"{name}:{attribute}"] = dict(value)
            elif not attribute.endswith("_hooks"):
                found[f"{name}:{attribute}"] = {"value": value}
            if isinstance(value, PreTrainedConfig):
                found[f"{name}:{attribute} holds"] = {"values": _values(value)}
    return found


def _values(config: PreTrainedConfig) -> dict[str, Any]:
    return {n: id(v) if isinstance(v, PreTrainedConfig) else copy.deepcopy(v) for n, v in vars(config).items()}


def changes(model: nn.Module, before: State) -> list[str]:
    """What is no longer as it was, by module and attribute."""
    now = state(model)
    changed = sorted(now.keys() ^ before.keys())
    for name in now.keys() & before.keys():
        one, other = now[name], before[name]
        if name.endswith(" holds"):
            same = one == other
        else:
            same = list(one) == list(other) and all(one[key] is other[key] for key in one)
        if not same:
            changed.append(name)
    return changed
