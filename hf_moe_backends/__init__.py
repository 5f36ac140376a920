"""Pluggable backends for mixture-of-experts models in Hugging Face Transformers v5.

    from hf_moe_backends import BackendConfig, set_moe_backend

    set_moe_backend(model, BackendConfig(experts="torch_mm"))

Public names load on first use, so that listing backends needs neither torch nor Transformers. `survey` is imported from
`hf_moe_backends.survey`, whose name it shares.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from hf_moe_backends._version import __version__

if TYPE_CHECKING:
    from hf_moe_backends.api import (
        AutoModelForCausalLM as AutoModelForCausalLM,
    )
    from hf_moe_backends.api import (
        get_moe_backend as get_moe_backend,
    )
    from hf_moe_backends.api import (
        moe_backend as moe_backend,
    )
    from hf_moe_backends.api import (
        plan_moe_backend as plan_moe_backend,
    )
    from hf_moe_backends.api import (
        reset_moe_backend as reset_moe_backend,
    )
    from hf_moe_backends.api import (
        set_moe_backend as set_moe_backend,
    )
    from hf_moe_backends.clip import clip_grad_norm_ as clip_grad_norm_
    from hf_moe_backends.config import BackendConfig as BackendConfig
    from hf_moe_backends.errors import (
        BackendConflict as BackendConflict,
    )
    from hf_moe_backends.errors import (
        BackendUnavailable as BackendUnavailable,
    )
    from hf_moe_backends.errors import (
        ConfigError as ConfigError,
    )
    from hf_moe_backends.errors import (
        MoeBackendError as MoeBackendError,
    )
    from hf_moe_backends.errors import (
        NoSite as NoSite,
    )
    from hf_moe_backends.errors import (
        PlanError as PlanError,
    )
    from hf_moe_backends.errors import (
        RanksDisagree as RanksDisagree,
    )
    from hf_moe_backends.hookspecs import hookimpl as hookimpl
    from hf_moe_backends.plan import Plan as Plan
    from hf_moe_backends.spec import (
        AttentionBackend as AttentionBackend,
    )
    from hf_moe_backends.spec import (
        BackendSpec as BackendSpec,
    )
    from hf_moe_backends.spec import (
        Capabilities as Capabilities,
    )
    from hf_moe_backends.spec import (
        FusedLoss as FusedLoss,
    )
    from hf_moe_backends.spec import (
        Option as Option,
    )
    from hf_moe_backends.spec import (
        Requirement as Requirement,
    )

_HOME = {
    "AttentionBackend": "spec",
    "AutoModelForCausalLM": "api",
    "BackendConfig": "config",
    "BackendConflict": "errors",
    "BackendSpec": "spec",
    "BackendUnavailable": "errors",
    "Capabilities": "spec",
    "ConfigError": "errors",
    "FusedLoss": "spec",
    "MoeBackendError": "errors",
    "NoSite": "errors",
    "Option": "spec",
    "Plan": "plan",
    "PlanError": "errors",
    "RanksDisagree": "errors",
    "Requirement": "spec",
    "clip_grad_norm_": "clip",
    "get_moe_backend": "api",
    "hookimpl": "hookspecs",
    "moe_backend": "api",
    "plan_moe_backend": "api",
    "reset_moe_backend": "api",
    "set_moe_backend": "api",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'hf_moe_backends' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"hf_moe_backends.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
