"""The backends that come with the package, offered through the same hook as any plugin's."""

from __future__ import annotations

import importlib.metadata

from packaging.version import Version

from hf_moe_backends.hookspecs import hookimpl
from hf_moe_backends.spec import (
    FEATURES,
    KINDS,
    LOAD_TIME,
    STOCK,
    STOCK_NAMES,
    BackendSpec,
    Capabilities,
    Kind,
    Option,
    Requirement,
)

_TORCH = Requirement(distribution="torch", version=">=2.10")
_TRANSFORMERS = Requirement(distribution="transformers", version=">=5.17,<5.25")
_INSTALL = "pip install hf-moe-backends"
_TESTED = frozenset({"cpu", "cuda"})
_EVERYWHERE = frozenset({"cpu", "cuda", "xpu", "mps", "npu", "hpu"})
_FLOATS = frozenset({"float64", "float32", "bfloat16", "float16"})


@hookimpl
def hf_moe_backends_register() -> list[BackendSpec]:
    experts = Capabilities(
        devices=_TESTED,
        dtypes=_FLOATS,
        features=frozenset(FEATURES["experts"]),
    )
    ours = [
        BackendSpec(
            kind="experts",
            name="torch_mm",
            target="hf_moe_backends.builtin.experts.torch_mm:torch_mm",
            capabilities=experts,
            requires=(_TORCH, _TRANSFORMERS),
            install=_INSTALL,
            priority=50,
        ),
        BackendSpec(
            kind="experts",
            name="loop",
            target="hf_moe_backends.builtin.experts.loop:loop",
            # it visits the experts that were hit, so the host asks the device which they are
            capabilities=Capabilities(
                devices=_TESTED,
                dtypes=_FLOATS,
                features=frozenset(FEATURES["experts"]),
                compile=False,
                host_sync=True,
            ),
            requires=(_TORCH, _TRANSFORMERS),
            install=_INSTALL,
            priority=-10,
        ),
        BackendSpec(
            kind="loss",
            name="chunked",
            target="hf_moe_backends.builtin.loss.chunked:chunked",
            capabilities=Capabilities(devices=_TESTED, dtypes=_FLOATS, compile=False, fuses_head=True),
            requires=(_TORCH, _TRANSFORMERS),
            options=(Option(name="chunk", type=int, default=1024, help="tokens whose logits exist at a time"),),
            install=_INSTALL,
        ),
        BackendSpec(
            kind="dispatcher",
            name="allgather",
            target="hf_moe_backends.builtin.dispatch.allgather:AllGather",
            capabilities=Capabilities(devices=_TESTED, dtypes=_FLOATS),
            requires=(_TORCH, _TRANSFORMERS),
            options=(
                Option(
                    name="equal_lengths",
                    type=bool,
                    default=False,
                    help="every rank has as many tokens in every call; CUDA graphs need it",
                ),
            ),
            install=_INSTALL,
        ),
    ]
    stock = [
        _stock(kind, name) for kind in KINDS for name in sorted(STOCK_NAMES[kind]) if (kind, name) not in LOAD_TIME
    ]
    return ours + [_ALL_TO_ALL if spec.name == "all_to_all" and _lacks_all_to_all() else spec for spec in stock]


_KERNELS = (Requirement(distribution="kernels"), "pip install kernels")
# one style is all there is before 5.23: the sum in 5.17 and 5.18, the exchange of pairs after, which is ours below
_NO_SUM = (
    Requirement(distribution="transformers", version="!=5.19.*,!=5.20.*,!=5.21.*,!=5.22.*"),
    "pip install 'transformers>=5.23,<5.25'",
)
_STOCK_REQUIRES: dict[tuple[Kind, str], tuple[Requirement, str]] = {
    ("attn", "flash_attention_2"): (
        Requirement(distribution="flash-attn", import_name="flash_attn"),
        "pip install flash-attn",
    ),
    ("attn", "flash_attention_3"): (
        Requirement(distribution="flash-attn-3", import_name="flash_attn_interface"),
        "pip install flash-attn-3",
    ),
    ("attn", "flash_attention_4"): (
        Requirement(distribution="flash-attn-4", import_name="flash_attn.cute"),
        "pip install flash-attn-4",
    ),
    ("experts", "sonicmoe"): _KERNELS,
    ("experts", "deepgemm"): _KERNELS,
    ("dispatcher", "all_reduce"): _NO_SUM,
}

_FLASH = Capabilities(
    devices=frozenset({"cuda", "xpu", "npu"}),
    dtypes=frozenset({"bfloat16", "float16"}),
    features=frozenset(FEATURES["attn"]),  # of sinks and the like, Transformers' own check has the last word
)
_STOCK_CAPABILITIES: dict[tuple[Kind, str], Capabilities] = {
    # torch's function has no place for either, and the families that have them refuse it
    ("attn", "sdpa"): Capabilities(
        devices=_EVERYWHERE, dtypes=_FLOATS, features=frozenset(FEATURES["attn"]) - {"sinks", "softcap"}
    ),
    ("attn", "flash_attention_2"): _FLASH,
    ("attn", "flash_attention_3"): _FLASH,
    ("attn", "flash_attention_4"): _FLASH,
    ("experts", "sonicmoe"): Capabilities(
        devices=frozenset({"cuda"}),
        min_sm=90,
        dtypes=frozenset({"bfloat16", "float16"}),
        features=frozenset(FEATURES["experts"]) - {"ungated", "post_expert_norm", "negative_ids"},
        # it takes the gate from config.hidden_act and never calls the module's own; its geglu is the tanh one
        gates=frozenset({"swiglu", "reglu"}),
    ),
    ("experts", "deepgemm"): Capabilities(
        devices=frozenset({"cuda"}),
        min_sm=90,
        dtypes=frozenset({"bfloat16"}),
        features=frozenset(FEATURES["experts"]) - {"post_expert_norm", "negative_ids"},
        training=False,  # its products write into buffers that autograd knows nothing of
    ),
}


_ALL_TO_ALL = BackendSpec(
    kind="dispatcher",
    name="all_to_all",
    target="hf_moe_backends.builtin.dispatch.all_to_all:AllToAll",
    capabilities=Capabilities(devices=_TESTED, dtypes=_FLOATS, compile=False, host_sync=True),
    requires=(_TORCH, _TRANSFORMERS),
    install=_INSTALL,
    hands=frozenset(),
)
"""In place of the stock one, where that is none."""


def _lacks_all_to_all() -> bool:
    try:
        return Version(importlib.metadata.version("transformers")) < Version("5.19")
    except importlib.metadata.PackageNotFoundError:
        return False


def _stock(kind: Kind, name: str) -> BackendSpec:
    """A pass-through of Transformers' own code: the plan writes the name where Transformers reads it."""
    required = _STOCK_REQUIRES.get((kind, name))
    everything = Capabilities(
        devices=_EVERYWHERE,
        dtypes=_FLOATS,
        features=frozenset(FEATURES[kind]) - {"negative_ids"},
        host_sync=name == "eager",
    )
    return BackendSpec(
        kind=kind,
        name=name,
        target=STOCK,
        capabilities=_STOCK_CAPABILITIES.get((kind, name), everything),
        requires=(_TORCH, _TRANSFORMERS) + ((required[0],) if required else ()),
        install=required[1] if required else _INSTALL,
        hands=frozenset() if name == "all_to_all" else frozenset({"sentinels"}),
    )


def stock() -> None:
    """The target of stock names. It stands for code that is Transformers' own and is never called."""
