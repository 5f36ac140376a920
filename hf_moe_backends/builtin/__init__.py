"""The backends that come with the package, offered through the same hook as any plugin's."""

from __future__ import annotations

from hf_moe_backends.hookspecs import hookimpl
from hf_moe_backends.spec import (
    FEATURES,
    STOCK_NAMES,
    BackendSpec,
    Capabilities,
    Kind,
    Requirement,
)

_TORCH = Requirement(distribution="torch", version=">=2.10")
_TRANSFORMERS = Requirement(distribution="transformers", version=">=5.17,<5.25")
_INSTALL = "pip install hf-moe-backends"
_EVERYWHERE = frozenset({"cpu", "cuda", "xpu", "mps"})
_FLOATS = frozenset({"float64", "float32", "bfloat16", "float16"})


@hookimpl
def hf_moe_backends_register() -> list[BackendSpec]:
    experts = Capabilities(
        devices=_EVERYWHERE,
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
                devices=_EVERYWHERE,
                dtypes=_FLOATS,
                features=frozenset(FEATURES["experts"]),
                compile=False,
                host_sync=True,
            ),
            requires=(_TORCH, _TRANSFORMERS),
            install=_INSTALL,
            priority=-10,
        ),
    ]
    return ours + [_stock(kind, name) for kind, names in STOCK_NAMES.items() for name in sorted(names)]


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
    ("experts", "sonicmoe"): (Requirement(distribution="kernels"), "pip install kernels"),
    ("experts", "deepgemm"): (Requirement(distribution="kernels"), "pip install kernels"),
    ("experts", "deepgemm_megamoe"): (Requirement(distribution="kernels"), "pip install kernels"),
    ("dispatcher", "all_to_all"): (
        Requirement(distribution="transformers", version=">=5.23"),
        "pip install 'transformers>=5.23,<5.25'",
    ),
    ("dispatcher", "all_reduce"): (
        Requirement(distribution="transformers", version=">=5.23"),
        "pip install 'transformers>=5.23,<5.25'",
    ),
}


def _stock(kind: Kind, name: str) -> BackendSpec:
    """A pass-through of Transformers' own code: the plan writes the name where Transformers reads it."""
    required = _STOCK_REQUIRES.get((kind, name))
    return BackendSpec(
        kind=kind,
        name=name,
        target="hf_moe_backends.builtin:stock",
        capabilities=Capabilities(
            devices=_EVERYWHERE, dtypes=_FLOATS, features=frozenset(FEATURES[kind]), host_sync=name == "eager"
        ),
        requires=(_TORCH, _TRANSFORMERS) + ((required[0],) if required else ()),
        install=required[1] if required else _INSTALL,
    )


def stock() -> None:
    """The target of stock names. It stands for code that is Transformers' own and is never called."""
