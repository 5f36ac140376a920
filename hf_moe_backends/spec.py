"""What a backend declares about itself: plain data, readable without torch and without the backend's own packages."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

CONTRACT = 1
"""The version of the plugin contract: this module's dataclasses and the call signatures in `KINDS`."""

Kind = Literal["attn", "linear", "norm", "experts", "dispatcher", "loss"]
KINDS: tuple[Kind, ...] = get_args(Kind)

STOCK_NAMES: Mapping[Kind, frozenset[str]] = {
    "experts": frozenset({"eager", "grouped_mm", "batched_mm", "sonicmoe", "deepgemm", "deepgemm_megamoe"}),
    "attn": frozenset(
        {"eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4"}
    ),
    "dispatcher": frozenset({"all_to_all", "all_reduce"}),
    "linear": frozenset({"torch"}),
    "norm": frozenset({"torch"}),
    "loss": frozenset({"torch"}),
}
"""Names that mean Transformers' or torch's own code. Plugins cannot take them."""

STOCK = "hf_moe_backends.builtin:stock"
"""The target of backends that are Transformers' or torch's own code."""

LOAD_TIME: Mapping[tuple[Kind, str], str] = {
    ("experts", "deepgemm_megamoe"): "from_pretrained(..., experts_implementation='deepgemm_megamoe')",
}
"""Stock names that Transformers takes only while it loads a checkpoint, and how. No backend can be set to them."""

FEATURES: Mapping[Kind, Mapping[str, str]] = {
    "experts": {
        "transposed": "weights stored (experts, in, out)",
        "interleaved": "gate and up columns interleaved",
        "bias": "biases on both projections",
        "ungated": "experts without a gate (up_proj, activation, down_proj)",
        "post_expert_norm": "a norm on each expert's output",
        "sentinels": "expert-parallel sentinels (id == number of local experts, weight 0)",
        "negative_ids": "expert id -1 for pairs of other ranks",
        "parametrized": "weights computed at each access (LoRA through torch parametrizations)",
        "late_dispatch": "an experts class that Transformers does not decorate",
    },
    "attn": {
        "sinks": "learned attention sinks (s_aux)",
        "softcap": "soft-capped attention scores",
        "sliding_window": "a sliding window",
        "mla": "value heads of another size than query heads (MLA)",
        "gqa": "fewer key-value heads than query heads",
        "bidirectional": "attention that is not causal",
        "sparse_indices": "a sparse set of keys per query (an indexer's top-k)",
    },
    "linear": {
        "bias": "a bias",
        "router": "the router's projection",
        "head": "the output head",
    },
    "norm": {
        "zero_centred": "weights stored minus one",
        "unweighted": "no weight",
        "layer_norm": "LayerNorm",
        "custom": "a norm that is none of the known formulas",
    },
    "dispatcher": {},
    "loss": {},
}
"""What sites may demand beyond the plain case, by kind, in the words of an error message."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a backend can serve. A demand outside it is refused by name and passed over by `"auto"`.

    `features` lists what it serves of `FEATURES[kind]` beyond the plain case. `gates` lists the gate formulas it fuses
    (see `hf_moe_backends.recognise`); None means that it calls the module's own gate and so serves any. `min_sm` is the
    CUDA compute capability times ten (90 for Hopper). `alignment` is what each of a site's matrix sizes must be a
    multiple of, in elements. `host_sync` says that a call waits for the device. `fuses_head` says of a loss that its
    target is a `FusedLoss`, which takes the output head's product into itself.
    """

    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    min_sm: int | None = None
    dtypes: frozenset[str] = frozenset({"float32", "bfloat16", "float16"})
    features: frozenset[str] = frozenset()
    gates: frozenset[str] | None = None
    alignment: int = 1
    training: bool = True
    compile: bool = True
    autocast: bool = True
    deterministic: bool = True
    host_sync: bool = False
    fuses_head: bool = False


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """A package that a backend needs: its distribution, the name it imports as, and the versions that work."""

    distribution: str
    import_name: str | None = None
    version: str = ""

    def __post_init__(self) -> None:
        SpecifierSet(self.version)  # raises here, in the plugin that wrote it, and not in whoever asks

    def missing(self) -> str | None:
        """Why this requirement is not met here, or None. Reads metadata only; imports nothing."""
        wanted = f"{self.distribution}{self.version}"
        try:
            found = importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            if not self.version and _importable(self.import_name or self.distribution.replace("-", "_")):
                return None  # the same module from a distribution of another name
            return f"needs {wanted}, not installed"
        try:
            met = not self.version or SpecifierSet(self.version).contains(found, prereleases=True)
        except InvalidVersion:  # of a build by hand; newer versions of packaging say False
            met = False
        return None if met else f"needs {wanted}, found {found}"


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of a backend, given as `BackendConfig(options={"kind.backend": {name: value}})`."""

    name: str
    type: type[bool] | type[int] | type[float] | type[str]
    default: bool | int | float | str | None
    help: str

    def __post_init__(self) -> None:
        if not self.accepts(self.default):
            raise ValueError(f"option {self.name!r} takes {self.type.__name__}, but its default is {self.default!r}")

    def accepts(self, value: object) -> bool:
        """Whether `value` is of the declared type. A bool is no int, an int is a float, None is for a default None."""
        if value is None:
            return self.default is None
        if isinstance(value, bool):
            return self.type is bool
        return isinstance(value, (int, float) if self.type is float else self.type)


@dataclass(frozen=True, kw_only=True)
class BackendSpec:
    """One backend, as a plugin offers it.

    `target` is `"package.module:attribute"`, imported only when a plan needs it. What the attribute must be depends on
    the kind (T tokens, K experts a token, H hidden size):

    - `experts`: `fn(experts, hidden_states (T, H), top_k_index (T, K) int64, top_k_weights (T, K), **options)
      -> (T, H)`, Transformers' own contract of `ALL_EXPERTS_FUNCTIONS`;
    - `attn`: an `AttentionBackend`;
    - `linear`, `norm`: `convert(module, **options) -> Module` that holds the same Parameter objects under the same
      names and allocates nothing;
    - `dispatcher`: a class as `expert_parallel.Dispatcher` says; from Transformers 5.23 on also one with the
      constructor and the call of its `EPImplementation`;
    - `loss`: `fn(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **kwargs)
      -> scalar`, Transformers' own `loss_function` contract; or a `FusedLoss`, with `fuses_head` in its capabilities.

    `probe` names a function of no arguments, `"package.module:attribute"`, that returns why the backend cannot run on
    this machine, or None. `install` is the pip command that makes the backend available. Of the backends that can serve
    a model, `"auto"` takes the one with the highest `priority`. Stock code has 0, so the default is used by name only.

    `hands` says which pairs for other ranks' experts a dispatcher hands to the experts backend: `"sentinels"`,
    `"negative_ids"` (as in `FEATURES`) or none. Ids of -1 are handed on to experts backends that declare them, and
    become sentinels for the others.
    """

    kind: Kind
    name: str
    target: str
    capabilities: Capabilities = field(default_factory=Capabilities)
    requires: tuple[Requirement, ...] = ()
    probe: str | None = None
    options: tuple[Option, ...] = ()
    install: str = ""
    contract: int = CONTRACT
    priority: int = 0
    hands: frozenset[str] = frozenset({"sentinels"})

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"BackendSpec kind={self.kind!r} is none of {', '.join(KINDS)}")
        if not self.name.isidentifier() or self.name == "auto":
            raise ValueError(f"BackendSpec name={self.name!r} must be an identifier other than 'auto'")
        for name, path in (("target", self.target), ("probe", self.probe)):
            if path is not None and not all(path.partition(":")):
                raise ValueError(f"BackendSpec {name}={path!r} must read 'package.module:attribute'")
        if not self.hands <= {"sentinels", "negative_ids"}:
            raise ValueError(f"{self.kind}={self.name!r} hands {sorted(self.hands)}; known: negative_ids, sentinels")
        unknown = self.capabilities.features - FEATURES[self.kind].keys()
        if unknown:
            raise ValueError(
                f"{self.kind}={self.name!r} claims unknown features {sorted(unknown)}; "
                f"known: {', '.join(FEATURES[self.kind]) or 'none'}"
            )

    def load(self) -> Any:
        """Import and return `target`."""
        return load_object(self.target)

    def resolve_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The values of all options: `given` over the defaults.

        Raises:
            ValueError: an option that this backend does not have, or a value of another type than declared.
        """
        from hf_moe_backends.errors import nearest

        declared = {option.name: option for option in self.options}
        for name, value in given.items():
            if name not in declared:
                raise ValueError(f"{self.kind}.{self.name} has no option {name!r}: {nearest(name, declared)}")
            if not declared[name].accepts(value):
                raise ValueError(
                    f"option {self.kind}.{self.name}.{name} takes {declared[name].type.__name__}, got {value!r} "
                    f"({type(value).__name__})"
                )
        return {name: given.get(name, option.default) for name, option in declared.items()}


@dataclass(frozen=True, kw_only=True)
class AttentionBackend:
    """What an `attn` backend's target is.

    `attention(module, query (B, Hq, S, D), key (B, Hkv, S, D), value, attention_mask, dropout=, scaling=, **kwargs)
    -> (output (B, S, Hq, D), weights or None)` is Transformers' `AttentionInterface` contract. `mask` is a mask
    function of its `AttentionMaskInterface`, or the name of a stock one. It has no default: an attention function whose
    name has no mask function is handed None in silence, padding or not.
    """

    attention: Callable[..., Any]
    mask: Callable[..., Any] | str


@dataclass(frozen=True, kw_only=True)
class FusedLoss:
    """What the target of a `loss` backend is that computes no full logits.

    `function(hidden (N, H), weight (V, H), labels (N,) int64, *, bias (V,) or None, ignore_index: int, num_items,
    scale: float, softcap: float or None, **options) -> scalar` in float32 (float64 for float64), differentiable by
    `hidden`, `weight` and `bias`, which have one dtype.

    The loss is the cross entropy of `softcap * tanh(scale * logits / softcap)`, or of `scale * logits` without a cap,
    where `logits = hidden @ weight.T + bias`; its sum over the labels other than `ignore_index`, divided by `num_items`
    (an int or a tensor of one element), or by the number of such labels where that is None. Labels are shifted already.
    """

    function: Callable[..., Any]


def _importable(name: str) -> bool:
    """Whether a module is there to import. The packages that a dotted name goes through are searched, not imported."""
    top, *inner = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # ValueError: a stub that somebody put into sys.modules
        return False
    for part in inner:
        if spec is None or spec.submodule_search_locations is None:
            return False
        spec = importlib.machinery.PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations)
    return spec is not None


def load_object(path: str) -> Any:
    """Import `"package.module:attribute"`."""
    module, _, attribute = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found
