"""`survey(model)`: the sites of every kind in a model, each with what it demands of a backend."""

from __future__ import annotations

import inspect
import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MethodType
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_moe_backends.recognise import Gate, Norm, recognise_gate, recognise_norm
from hf_moe_backends.spec import KINDS, Kind


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a site asks of a backend, whatever its kind.

    `features` are names of `spec.FEATURES`. `sizes` are matrix sizes in elements, those that a backend's `alignment`
    must divide. `device` is where the module computes, `"meta"` when that is not decided. `sharding` is `ep`, `fsdp2`,
    `fsdp1`, `zero3` or None. `blocked` says why no backend but the stock code can serve this site, or None.
    """

    device: str
    dtype: str | None
    training: bool = False
    features: frozenset[str] = frozenset()
    sizes: Mapping[str, int] = field(default_factory=dict)
    sharding: str | None = None
    blocked: str | None = None

    def summary(self) -> str:
        """One line that tells sites of different demands apart."""
        sizes = " ".join(f"{name} {size}" for name, size in self.sizes.items())
        parts = [sizes, self.dtype or "", self.device, " ".join(sorted(self.features)), self.sharding or ""]
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, kw_only=True)
class ExpertsDemand(Demand):
    """An experts module of `count` experts (0 where its weights do not tell), on this rank under EP."""

    gate: Gate
    count: int = 0

    def summary(self) -> str:
        return f"{self.count} experts, {super().summary()}, {self.gate}"


@dataclass(frozen=True, kw_only=True)
class AttentionDemand(Demand):
    """An attention module that goes through `ALL_ATTENTION_FUNCTIONS`."""


@dataclass(frozen=True, kw_only=True)
class LossDemand(Demand):
    """A model with an output head over a vocabulary. `cannot_fuse` says why a loss cannot take the head in, or None."""

    cannot_fuse: str | None = None


@dataclass(frozen=True, kw_only=True)
class NormDemand(Demand):
    """A norm over the last dimension."""

    norm: Norm

    def summary(self) -> str:
        order = ", rounds before its weight" if self.norm.cast_before_weight else ""
        return f"{super().summary()}, {self.norm.formula}(eps={self.norm.eps:g}){order}"


@dataclass(frozen=True, kw_only=True)
class Site:
    """One place in one model where a kind applies."""

    kind: Kind
    name: str
    module: nn.Module = field(repr=False)
    demand: Demand

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Site) and self.kind == other.kind and self.module is other.module

    def __hash__(self) -> int:
        return hash((self.kind, id(self.module)))


def survey(model: nn.Module) -> dict[Kind, tuple[Site, ...]]:
    """The sites of every kind, in the order of `model.named_modules()`. Reads the model and changes nothing.

    Sub-models are included: the text and vision parts of a vision-language model, the thinker and talker of an omni
    model. A module that is used twice is one site.
    """
    found: dict[Kind, list[Site]] = {kind: [] for kind in KINDS}
    context = _Context(model)
    for name, module in model.named_modules():
        for site in context.sites(name, module):
            found[site.kind].append(site)
    return {kind: tuple(sites) for kind, sites in found.items()}


UNDISPATCHED: Mapping[str, tuple[str, str]] = {
    "Llama4TextExperts": (
        "llama4",
        "it runs every expert on every token in one dense product, on inputs scaled beforehand",
    ),
    "DbrxExperts": ("dbrx", "it keeps w1, v1 and w2 as (experts * intermediate, hidden) in an inner module"),
    "JetMoeParallelExperts": ("jetmoe", "it routes attention heads as well, over weights of its own ParallelExperts"),
    "LongcatFlashExperts": (
        "longcat_flash",
        "it mixes identity experts into the routing, with rows of weights that nothing uses",
    ),
    "SwitchTransformersExperts": (
        "switch_transformers",
        "its experts are separate modules, with a capacity that drops tokens",
    ),
    "NllbMoeExperts": ("nllb_moe", "its experts are separate modules"),
    "DogeCDMoE": ("doge", "its experts are rows of an embedding, retrieved by product keys"),
    "VitPoseNaiveMoe": ("vitpose_backbone", "its experts are separate linear layers, one a data set"),
    "AriaExperts": (
        "aria",
        "this version of Transformers computes them in a loop of its own; a newer one dispatches them",
    ),
    "FP8Experts": (
        "an FP8 checkpoint",
        "quantised experts have kernels of their own, chosen with model.set_experts_implementation(...); "
        "to run another backend, load with quantization_config=FineGrainedFP8Config(dequantize=True)",
    ),
    "Mxfp4GptOssExperts": ("gpt_oss in MXFP4", "its weights are quantised; load with Mxfp4Config(dequantize=True)"),
    "SequentialLlama4TextExperts": ("llama4", "its experts were unfused into separate modules by a quantiser"),
}
"""Experts classes that Transformers does not dispatch and that this package does not serve: the family and the reason.

Setting `experts_implementation` on them is accepted by Transformers and does nothing.
"""


def _wrong_gradients(model: nn.Module) -> str | None:
    """Why the experts' gradients are wrong however their tokens travel, or None.

    Transformers 5.20 to 5.22 divide them by the number of batches twice where FSDP has no ranks to reduce over
    (measured: 0.5 times the right ones on two ranks, `conformance/tests/test_expert_gradients.py`).
    """
    version = Version(transformers.__version__)
    if not Version("5.20") <= version < Version("5.23"):
        return None
    config: Any = getattr(getattr(model, "config", None), "distributed_config", None)
    fsdp, tp, ep = (getattr(config, name, None) or 1 for name in ("fsdp_size", "tp_size", "ep_size"))
    if ep == 1 or fsdp == 1 or ep != fsdp * tp:
        return None
    return (
        f"Transformers {version} makes the experts' gradients {fsdp} times too small with fsdp_size={fsdp}, "
        f"tp_size={tp}, ep_size={ep} (ep_size == fsdp_size * tp_size). Use a smaller ep_size, or "
        "pip install 'transformers>=5.23,<5.25'"
    )


_ROUTED_GROUPS = ("gate_up_proj", "down_proj")


class _Context:
    """What the sites of one model share: who holds which module, and which experts have which router."""

    def __init__(self, model: nn.Module):
        self.parent: dict[nn.Module, nn.Module] = {}
        for module in model.modules():
            for child in module.children():
                self.parent.setdefault(child, module)
        self.fsdp2 = any(isinstance(module, FSDPModule) for module in model.modules())
        self.wrong_gradients = _wrong_gradients(model)
        self.heads = {
            head for m in model.modules() if isinstance(m, PreTrainedModel) and (head := _output_head(m)) is not None
        }

    def sites(self, name: str, module: nn.Module) -> Iterator[Site]:
        class_name = type(module).__name__
        if dispatches_experts(module):
            yield self._experts(name, module)
            if is_expert_parallel(module):
                demand = Demand(
                    device=_device(module),
                    dtype=_dtype(module),
                    training=module.training,
                    sharding="ep",
                    blocked=self.wrong_gradients,
                )
                yield Site(kind="dispatcher", name=name, module=module, demand=demand)
        elif dispatches_late(module):
            yield self._experts(name, module, late=True)
        elif class_name in UNDISPATCHED and type(module).__module__.startswith("transformers."):
            family, reason = UNDISPATCHED[class_name]
            blocked = f"{family} does not dispatch its experts: {reason}"
            yield Site(kind="experts", name=name, module=module, demand=_blocked(module, blocked))
        elif _looks_like_experts(module):
            blocked = f"{class_name} is not decorated with Transformers' @use_experts_implementation"
            yield Site(kind="experts", name=name, module=module, demand=_blocked(module, blocked))

        if dispatches_attention(module):
            yield Site(kind="attn", name=name, module=module, demand=self._attention(module))
        if type(module) is nn.Linear:
            yield Site(kind="linear", name=name, module=module, demand=self._linear(module))
        elif _is_norm(module):
            yield Site(kind="norm", name=name, module=module, demand=self._norm(module))
        if isinstance(module, PreTrainedModel) and _output_head(module) is not None:
            head: Any = _output_head(module)
            sizes = {"vocabulary": getattr(head.weight, "ds_shape", head.weight.shape)[0]}
            demand = LossDemand(
                device=_device(head),
                dtype=_dtype(head),
                training=module.training,
                sizes=sizes,
                cannot_fuse=cannot_fuse(module, head),
            )
            yield Site(kind="loss", name=name, module=module, demand=demand)

    def _experts(self, name: str, module: nn.Module, late: bool = False) -> Site:
        experts: Any = module
        gated = bool(getattr(experts, "has_gate", True))
        transposed = bool(getattr(experts, "is_transposed", False))
        features = {
            "transposed": transposed,
            "interleaved": gated and not getattr(experts, "is_concatenated", True),
            "bias": bool(getattr(experts, "has_bias", False)),
            "ungated": not gated,
            "post_expert_norm": bool(getattr(experts, "has_post_expert_norm", False)),
            "sentinels": is_expert_parallel(experts),
            "parametrized": hasattr(experts, "parametrizations"),
            "late_dispatch": late,
        }
        up_name = "gate_up_proj" if gated else "up_proj"
        weight = _stored(experts, up_name)
        sizes, count = {}, 0
        if weight is not None and len(shape := getattr(weight, "ds_shape", weight.shape)) == 3:
            fused = shape[2] if transposed else shape[1]
            count = shape[0]
            sizes = {
                "hidden": shape[1] if transposed else shape[2],
                "intermediate": fused // 2 if gated else fused,
            }
        dtype = _dtype(module)
        blocked = None
        if dtype is not None and dtype.startswith(("float8", "int", "uint")):
            blocked = f"its weights are quantised ({dtype})"
        elif late and "forward" in vars(module):
            blocked = f"{type(module).__name__} already has a forward of its own, so it cannot be decorated late"
        demand = ExpertsDemand(
            device=_device(module),
            dtype=dtype,
            training=module.training,
            features=frozenset(name for name, present in features.items() if present),
            sizes=sizes,
            sharding=self._sharding(module),
            gate=recognise_gate(module),
            count=count,
            blocked=blocked,
        )
        return Site(kind="experts", name=name, module=module, demand=demand)

    def _attention(self, module: nn.Module) -> Demand:
        attention: Any = module
        source = _forward_source(type(module))  # type: ignore[arg-type]
        head = getattr(attention, "qk_head_dim", None) or getattr(attention, "head_dim", None) or 0
        value_head = getattr(attention, "v_head_dim", None) or head
        groups = getattr(attention, "num_key_value_groups", 1)
        features = {
            "sinks": _passes(attention, "s_aux", source),
            "softcap": _passes(attention, "softcap", source),
            "sliding_window": _passes(attention, "sliding_window", source),
            "mla": value_head != head,
            "gqa": isinstance(groups, int) and groups > 1,
            "bidirectional": not getattr(attention, "is_causal", True),
            # these families mask the indexer's choice into the mask for eager and sdpa only, and hand any other
            # implementation the indices instead
            "sparse_indices": '_attn_implementation in ("eager", "sdpa")' in source,
        }
        sizes = {"head": head} | ({"value head": value_head} if value_head != head else {})
        return AttentionDemand(
            device=_device(module),
            dtype=_computes_in(module),
            training=module.training,
            features=frozenset(name for name, present in features.items() if present),
            sizes=sizes if head else {},
            sharding=self._sharding(module),
        )

    def _linear(self, module: nn.Linear) -> Demand:
        features = {
            "bias": module.bias is not None,
            "head": module in self.heads,
            "router": self._is_router(module),
        }
        return Demand(
            device=_device(module),
            dtype=_dtype(module),
            training=module.training,
            features=frozenset(name for name, present in features.items() if present),
            sizes={"in": module.in_features, "out": module.out_features},
            sharding=self._sharding(module),
            blocked=cannot_replace(module),
        )

    def _is_router(self, module: nn.Linear) -> bool:
        """A projection to one score an expert, beside the experts it scores or one module below."""
        owner = self.parent.get(module)
        for _ in range(2):
            if owner is None:
                return False
            for sibling in owner.children():
                scored = getattr(sibling, "num_experts", None)
                if hasattr(sibling, "down_proj") and scored == module.out_features:
                    return True
            owner = self.parent.get(owner)
        return False

    def _norm(self, module: nn.Module) -> Demand:
        norm = recognise_norm(module)
        weight = next(iter(module.parameters(recurse=False)), None)
        features = {
            "zero_centred": norm.zero_centred,
            "unweighted": not norm.weighted,
            "layer_norm": norm.formula == "layer",
            "custom": norm.formula == "custom",
        }
        return NormDemand(
            device=_device(module),
            dtype=_dtype(module),
            training=module.training,
            features=frozenset(name for name, present in features.items() if present),
            sizes={} if weight is None else {"width": getattr(weight, "ds_shape", weight.shape)[-1]},
            sharding=self._sharding(module),
            blocked=cannot_replace(module),
            norm=norm,
        )

    def _sharding(self, module: nn.Module) -> str | None:
        if is_expert_parallel(module):
            return "ep"
        sharding = sharding_of(module)
        # between a forward and its backward fully_shard leaves whole parameters, so that only the modules tell
        return "fsdp2" if sharding == "fsdp1" and self.fsdp2 else sharding


def sharding_of(module: nn.Module) -> str | None:
    """How this module's own parameters are sharded, as far as the module alone tells."""
    parameters = list(module.parameters(recurse=False))
    if any(isinstance(p, DTensor) for p in parameters):
        return "fsdp2"
    if any(hasattr(p, "ds_id") for p in parameters):
        return "zero3"
    if getattr(module, "_is_fsdp_managed_module", False):  # set by torch on every module that FSDP gathers
        return "fsdp1"
    return None


def attachments(module: nn.Module) -> frozenset[tuple[str, object]]:
    """What others have hung on this very module, and what another module in its place would therefore lack."""
    state = vars(module)
    hooks = {(name, key) for name, held in state.items() if name.endswith("_hooks") and held for key in held}
    own = {(name, None) for name in ("forward", "_hf_hook", "_compiled_call_impl") if state.get(name) is not None}
    if state.get("forward") == MethodType(type(module).forward, module):
        own.discard(("forward", None))  # the class's own, which accelerate leaves behind when it removes a hook
    return frozenset(hooks | own)


def cannot_replace(module: nn.Module) -> str | None:
    """Why another module cannot take this one's place, or None."""
    sharding = sharding_of(module)
    if sharding is not None:
        return (
            "its parameters are sharded already (FSDP, tensor parallelism or ZeRO-3), and the sharding goes on working "
            "on the module it knows. Set backends before sharding"
        )
    if getattr(module, "_hf_hook", None) is not None:
        return (
            "accelerate has hooked it (device_map or offload), and the hook would be lost. "
            "Set backends before dispatch_model"
        )
    if attachments(module):
        return "it has hooks or a forward of its own, which would be lost"
    return None


def cannot_fuse(model: PreTrainedModel, head: nn.Module) -> str | None:
    """Why a fused loss cannot compute a model's loss from the input of its output head, or None."""
    owner = type(model).__name__
    kind = f"{type(head).__module__}.{type(head).__qualname__}"
    if isinstance(head, FSDPModule):
        return "FSDP gathers the output head's weight for its own forward alone. Shard it with the whole model"
    if type(head) is not nn.Linear:
        return f"the output head of {owner} is a {kind}, and only of an nn.Linear is it known what it computes"
    if hasattr(head, "parametrizations"):
        return f"the weight of {owner}'s output head is parametrized"
    sharding = sharding_of(head)
    if sharding in ("zero3", "fsdp1"):
        return f"the output head's weight is gathered by {sharding} for its own forward alone"
    if sharding == "fsdp2" and not any(isinstance(module, FSDPModule) for module in model.modules()):
        return "the output head's weight is split by tensor parallelism"
    if attachments(head):
        return "the output head has hooks or a forward of its own, which expect its logits"
    if "self.loss_function(" not in _forward_source(type(model)):  # type: ignore[arg-type]  # a metaclass is hashable
        return f"{owner}'s forward computes its loss in code of its own"
    if inspect.unwrap(model.loss_function) is not ForCausalLMLoss:
        return f"the loss of {owner} is not Transformers' ForCausalLMLoss"
    return None


def dispatches_experts(module: nn.Module) -> bool:
    """Whether this module's class looks its forward up in `ALL_EXPERTS_FUNCTIONS` (`@use_experts_implementation`)."""
    return _decorated_forward(type(module)) is not None  # type: ignore[arg-type]  # a module's metaclass is hashable


@cache
def _decorated_forward(cls: Hashable) -> Any:
    forward = getattr(cls, "forward", None)
    for cell in getattr(forward, "__closure__", None) or ():
        if cell.cell_contents is ALL_EXPERTS_FUNCTIONS:
            return forward
    return None


def dispatches_late(module: nn.Module) -> bool:
    """Whether this undecorated experts module has the default layout and so can be made to dispatch."""
    named = any(cls.__name__ == "Step3p7Experts" for cls in type(module).__mro__)  # fully_shard makes a subclass
    return named and _looks_like_experts(module) and hasattr(module, "_apply_gate")


def dispatches_attention(module: nn.Module) -> bool:
    """Whether this module's own forward looks its attention function up in `ALL_ATTENTION_FUNCTIONS`."""
    return "ALL_ATTENTION_FUNCTIONS.get_interface(" in _forward_source(type(module))  # type: ignore[arg-type]


@cache
def _forward_source(cls: Hashable) -> str:
    try:
        return inspect.getsource(inspect.unwrap(cls.forward))  # type: ignore[attr-defined]
    except (OSError, TypeError, AttributeError):
        return ""


def _passes(attention: nn.Module, argument: str, source: str) -> bool:
    """Whether this module hands its attention function a value for `argument`, in what its forward's source says.

    An expression of another form than Transformers uses counts as one: a backend that cannot serve it then refuses.
    """
    passed = re.search(rf"\b{argument}=(.*)", source)
    if passed is None or re.match(r"None\b", passed[1]):
        return False
    of_config = re.match(r'getattr\(self\.config, "(\w+)", None\)', passed[1])
    if of_config:
        return getattr(attention.config, of_config[1], None) is not None
    own = re.match(r"self\.(\w+)(?: if self\.(\w+) else None)?", passed[1])
    if own:
        return getattr(attention, own[1], None) is not None and (own[2] is None or bool(getattr(attention, own[2])))
    return True


def is_expert_parallel(module: nn.Module) -> bool:
    """Whether this experts module holds one rank's experts, so that ids outside them can arrive."""
    if getattr(module, "_is_expert_parallel", False):  # from Transformers 5.18
        return True
    forward = vars(module).get("forward")
    return getattr(forward, "__qualname__", "").startswith(("EpDispatchExperts", "MoeExpertsParallel"))


def _looks_like_experts(module: nn.Module) -> bool:
    weights = [module._parameters.get(name) for name in _ROUTED_GROUPS]
    return all(w is not None and w.ndim == 3 for w in weights) and hasattr(module, "num_experts")


def _is_norm(module: nn.Module) -> bool:
    if next(module.children(), None) is not None:
        return False
    parameters = dict(module.named_parameters(recurse=False))
    if not parameters:
        return "norm" in type(module).__name__.lower()
    return "weight" in parameters and "norm" in type(module).__name__.lower()


def _output_head(model: PreTrainedModel) -> nn.Module | None:
    """The output head of a model that computes a loss over a vocabulary, else None."""
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return head if isinstance(head, nn.Module) and hasattr(head, "weight") else None


def _stored(module: nn.Module, name: str) -> torch.Tensor | None:
    """A weight without computing it: the original under a parametrization."""
    parametrized = getattr(module, "parametrizations", None)
    if parametrized is not None and name in parametrized:
        original: torch.Tensor = parametrized[name].original
        return original
    value = getattr(module, name, None)
    return value if isinstance(value, torch.Tensor) else None


def _first_tensor(module: nn.Module) -> torch.Tensor | None:
    return next(module.parameters(), None)


def _device(module: nn.Module) -> str:
    hook = getattr(module, "_hf_hook", None)  # accelerate: the weights may be elsewhere until the forward
    device = getattr(hook, "execution_device", None)
    if device is not None:
        return torch.device(device).type
    tensor = _first_tensor(module)
    return "cpu" if tensor is None else tensor.device.type


def _dtype(module: nn.Module) -> str | None:
    tensor = _first_tensor(module)
    return None if tensor is None else str(tensor.dtype).removeprefix("torch.")


def _computes_in(module: nn.Module) -> str | None:
    """The dtype of a module's activations, whatever its linear layers store their weights in."""
    dtype = _dtype(module)
    if dtype is not None and dtype.startswith(("float8", "int", "uint")):
        dtype = getattr(getattr(module, "config", None), "dtype", None)
        dtype = None if dtype is None else str(dtype).removeprefix("torch.")
    return dtype


def _blocked(module: nn.Module, reason: str) -> Demand:
    return ExpertsDemand(
        device=_device(module),
        dtype=_dtype(module),
        training=module.training,
        gate=Gate(formula="custom"),
        blocked=reason,
    )
