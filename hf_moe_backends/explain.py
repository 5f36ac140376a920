"""What `hf-moe-backends explain` shows: the plan for a model, from its config alone, on the meta device."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.quantizers.auto import AutoHfQuantizer

from hf_moe_backends.api import plan_moe_backend
from hf_moe_backends.config import BackendConfig
from hf_moe_backends.errors import MoeBackendError
from hf_moe_backends.plan import Plan

SCHEMA = 1
"""The version of `Explanation.to_dict`'s form, as `listing.SCHEMA` is of the listing's."""


class ModelError(MoeBackendError, ValueError):
    """The model that was named cannot be built from its config."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A plan with what is worth knowing about the model it was made for.

    `parameters` counts each shared parameter once. `notes` say where the model that is loaded may differ from the one
    that was planned for.
    """

    source: str
    plan: Plan
    device: str
    parameters: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.source}: {_count(self.parameters)} parameters, planned for {self.device}", str(self.plan)]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """The form of `explain --json`.

        `config` is what the plan puts in place, with `"auto"` resolved, in `BackendConfig.to_dict`'s form. `kinds` has
        one object a kind: what was `asked`, the `backend` (null where the kind stays as it is; `note` says why), its
        `distribution` and `version`, the number of `sites`, the `hooks` it goes through, all `options`, the sites'
        `demands` with their counts, and the `candidates` that were looked at with why each lost (null: taken).
        """
        return {
            "schema": SCHEMA,
            "model": type(self.plan.model).__name__,
            "source": self.source,
            "parameters": self.parameters,
            "device": self.device,
            "config": self.plan.config.to_dict(),
            "notes": list(self.notes),
            "kinds": [
                {
                    "kind": choice.kind,
                    "asked": choice.asked,
                    "backend": choice.backend.spec.name if choice.backend else None,
                    "distribution": choice.backend.plugin.distribution if choice.backend else None,
                    "version": choice.backend.plugin.version if choice.backend else None,
                    "sites": len(choice.sites),
                    "hooks": [edit.hook for edit in self.plan.edits if edit.backend is choice.backend],
                    "options": dict(choice.options),
                    "demands": [
                        {"count": count, "demand": demand}
                        for demand, count in Counter(site.demand.summary() for site in choice.sites).items()
                    ],
                    "note": choice.note,
                    "candidates": [
                        {"name": candidate.name, "plugin": candidate.plugin, "lost": candidate.lost}
                        for candidate in choice.trace
                    ],
                }
                for choice in self.plan.choices
            ],
        }


def explain(
    source: str,
    config: BackendConfig,
    *,
    device: str | None = None,
    dtype: str | None = None,
    dequantize: bool = False,
    trust_remote_code: bool = False,
) -> Explanation:
    """Plan `config` for a model of which only the config is read.

    Args:
        source: a checkpoint directory, a config.json file or a Hub id.
        device: the device type to plan for. Default: cuda where there is one, else cpu.
        dtype: the dtype to plan for. Default: the config's.
        dequantize: plan for a quantised checkpoint as it is when it is dequantised at load.
        trust_remote_code: run the model's own code from its checkpoint.

    Raises:
        ModelError: there is no such model, or its config cannot be read.
        MoeBackendError: `config` cannot be applied to this model on this machine.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model, notes = meta_model(source, dtype=dtype, dequantize=dequantize, trust_remote_code=trust_remote_code)
    plan = plan_moe_backend(model, config, device=device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Explanation(source=source, plan=plan, device=device, parameters=parameters, notes=tuple(notes))


def meta_model(
    source: str, *, dtype: str | None = None, dequantize: bool = False, trust_remote_code: bool = False
) -> tuple[nn.Module, list[str]]:
    """The model as `from_pretrained` would make it, without its weights, and notes on how it may differ.

    Raises:
        ModelError: see `explain`.
    """
    config = _config(source, trust_remote_code)
    notes: list[str] = []
    if dtype is None and config.dtype is None and config.get_text_config().dtype is None:
        notes.append("the config names no dtype, so this is planned in float32; --dtype bfloat16 plans for that")
    kwargs = {} if dtype is None else {"dtype": getattr(torch, dtype)}
    quantisation: dict[str, Any] | None = getattr(config, "quantization_config", None)
    try:
        with torch.device("meta"):
            model: nn.Module = _build(config, trust_remote_code, kwargs)
    except (ValueError, TypeError, AttributeError, KeyError, ImportError) as error:
        raise ModelError(f"{source}: {type(config).__name__} makes no model: {_briefly(error)}") from error
    if quantisation and dequantize:
        notes.append(
            f"planned as dequantised at load; the checkpoint is quantised ({quantisation.get('quant_method')})"
        )
    elif quantisation:
        notes.extend(_quantise(model, quantisation))
    return model.eval(), notes


def _config(source: str, trust_remote_code: bool) -> Any:
    path = Path(source)
    if not path.exists() and (path.suffix == ".json" or source.startswith((".", "/", "~")) or source.count("/") > 1):
        raise ModelError(f"{source}: no such file or directory")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(f"{source}: this directory has no config.json")
    try:
        return transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:  # each config class checks its fields with errors of its own
        kind = "not a readable config" if path.exists() else "neither a file here nor a model that the Hub gives"
        raise ModelError(f"{source}: {kind}: {_briefly(error)}") from error


def _build(config: Any, trust_remote_code: bool, kwargs: dict[str, Any]) -> Any:
    """The class that the config says was saved, so that a vision-language model is built whole."""
    for name in getattr(config, "architectures", None) or []:
        known = getattr(transformers, name, None)
        if isinstance(known, type) and issubclass(known, transformers.PreTrainedModel):
            model: Any = known
            return model._from_config(config, **kwargs)  # what the auto classes' from_config calls
    return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **kwargs)


def _quantise(model: nn.Module, quantisation: dict[str, Any]) -> list[str]:
    """Put in the modules that a quantised checkpoint loads into: they have kernels of their own, and other sites."""
    method = quantisation.get("quant_method")
    try:
        quantiser = AutoHfQuantizer.from_config(quantisation, pre_quantized=True)
        quantiser.preprocess_model(
            model=model, dtype=torch.bfloat16, device_map=None, checkpoint_files=None, use_kernels=False
        )
    except Exception as error:  # a quantiser of another package may need that package, a GPU or the files themselves
        return [
            f"the checkpoint is quantised ({method}), and its modules cannot be made here ({_briefly(error)}). This "
            "plan is for the dequantised model; on the one that is loaded, backends may be refused"
        ]
    if getattr(quantiser.quantization_config, "dequantize", False):
        return [f"the checkpoint is quantised ({method}); on this machine Transformers dequantises it at load"]
    return [f"planned as quantised ({method}); --dequantize plans for the model that is dequantised at load"]


def _count(parameters: int) -> str:
    for unit, size in (("billion", 10**9), ("million", 10**6)):
        if parameters >= size:
            return f"{parameters / size:.1f} {unit}"
    return str(parameters)


def _briefly(error: Exception) -> str:
    """An error of another package on one line."""
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= 300 else f"{words[:300]} ..."
