"""The checks of attention backends: the attention function and its mask function together, as a model calls them.

Queries, keys and values are handed in directly, so that no projection's error hides the function's own. The mask comes
from Transformers' own mask creation under the name that the backend was set by: a backend without a mask function of
that name gets none, and is caught by padding.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    create_sliding_window_causal_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_moe_backends import reset_moe_backend
from hf_moe_conformance import reference, zoo
from hf_moe_conformance.cases import draw_seed
from hf_moe_conformance.check import Bench, Layout, Variant, check, require
from hf_moe_conformance.measures import Measure, measure
from hf_moe_conformance.subject import Subject

SEEDS = 3
WINDOW = 8


@dataclass(frozen=True, kw_only=True)
class AttentionLayout(Layout):
    """One family's attention.

    Attributes:
        build: a tiny model whose attention modules are all of this layout.
        passes: keyword arguments that the family's forward adds, and the module's attributes they are read from.
    """

    build: Callable[[], Any] = field(repr=False)
    passes: Mapping[str, str] = field(default_factory=dict)


def _gemma2() -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=zoo.VOCABULARY,
        hidden_size=zoo.HIDDEN,
        intermediate_size=zoo.FFN,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=zoo.HEAD,
        query_pre_attn_scalar=zoo.HEAD,
        attn_logit_softcapping=2.0,
        layer_types=["full_attention"],
        attn_implementation="eager",
    )
    return Gemma2ForCausalLM(config)


def _family(name: str, **overrides: Any) -> Callable[[], Any]:
    return partial(zoo.build, name, num_hidden_layers=1, attn_implementation="eager", **overrides)


def _bidirectional() -> Any:
    model = zoo.build("qwen3_moe", num_hidden_layers=1, attn_implementation="eager")
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
    return model


@cache
def attention_layouts() -> tuple[AttentionLayout, ...]:
    def layout(name: str, build: Callable[[], Any], *features: str, **passes: str) -> AttentionLayout:
        return AttentionLayout(name=name, build=build, features=frozenset(features), passes=passes)

    gpt_oss = partial(_family, "gpt_oss")
    window = {"sliding_window": WINDOW}
    return (
        layout("causal", _family("qwen3_moe", num_key_value_heads=zoo.HEADS)),
        layout("gqa", _family("qwen3_moe"), "gqa"),
        layout(
            "sliding",
            _family("qwen3_moe", use_sliding_window=True, max_window_layers=0, **window),
            "gqa",
            "sliding_window",
            sliding_window="sliding_window",
        ),
        layout("sinks", gpt_oss(layer_types=["full_attention"]), "gqa", "sinks", s_aux="sinks"),
        layout(
            "sinks_sliding",
            gpt_oss(layer_types=["sliding_attention"], **window),
            "gqa",
            "sinks",
            "sliding_window",
            sliding_window="sliding_window",
            s_aux="sinks",
        ),
        layout("softcap", _gemma2, "gqa", "softcap", softcap="attn_logit_softcapping"),
        layout("mla", _family("deepseek_v3", v_head_dim=24), "mla"),
        layout("bidirectional", _bidirectional, "gqa", "bidirectional"),
    )


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Which tokens attend to which.

    Attributes:
        queries: how many of the last tokens are queries, the ones before them being in a cache. 0 for all.
        padding: `left`, `right` or None.
        packed: two sequences in one row, told apart by their position ids.
        length: tokens, an odd number is drawn from this range.
    """

    name: str
    queries: int = 0
    padding: str | None = None
    packed: bool = False
    length: tuple[int, int] = (17, 45)


PLAIN = Scene(name="plain")
LONG = Scene(name="long", length=(257, 385))
LEFT, RIGHT = Scene(name="left padding", padding="left"), Scene(name="right padding", padding="right")
PACKED = Scene(name="packed sequences", packed=True)
DECODE, CHUNK = Scene(name="one query", queries=1), Scene(name="five queries", queries=5)


@dataclass(frozen=True, kw_only=True)
class AttentionInputs:
    query: Tensor  # (B, Hq, S, D)
    key: Tensor  # (B, Hkv, L, D)
    value: Tensor  # (B, Hkv, L, Dv)
    cotangent: Tensor  # (B, S, Hq, Dv), zero at padded queries
    padding: Tensor | None  # (B, L), 1 for real tokens
    positions: Tensor  # (B, S)
    sequence: Tensor | None  # (B, L)

    @property
    def real(self) -> Tensor:
        """(B, S), the queries that are compared: what a padded query returns is nobody's business."""
        queries = self.query.shape[2]
        if self.padding is None:
            return torch.ones(self.query.shape[0], queries, dtype=torch.bool)
        return self.padding[:, -queries:].bool()


class AttentionBench(Bench):
    """One attention backend on one dtype and layout."""

    layout: AttentionLayout

    def __init__(self, subject: Subject, variant: Variant):
        super().__init__(subject, variant)
        assert isinstance(variant.layout, AttentionLayout)
        self.layout, self.dtype = variant.layout, variant.torch_dtype
        self.stock = self.layout.build().to(self.dtype).to(subject.device).eval()
        with torch.no_grad():
            for name, parameter in self.stock.named_parameters():
                if name.endswith(
                    "sinks"
                ):  # in reach of unit-scale scores, so that they take a good part of the softmax
                    parameter.copy_(torch.randn(parameter.shape, generator=draw_seed(subject.seed, "sinks")) + 1)
        self._backed: dict[bool, nn.Module] = {}
        self._runs: dict[tuple[str, bool], list[tuple[AttentionInputs, Any, Any, Any]]] = {}

    @classmethod
    def layouts(cls) -> Sequence[Layout]:
        return attention_layouts()

    def candidate(self, needs: frozenset[str]) -> nn.Module:
        model: nn.Module = copy.deepcopy(self.stock).train("training" in needs)
        return model

    def backed(self, *, training: bool = False) -> nn.Module:
        """A copy of the stock model with the backend in place."""
        if training not in self._backed:
            model = copy.deepcopy(self.stock).train(training)
            self.put_in_place(model)
            self._backed[training] = model
        return self._backed[training]

    def inputs(self, scene: Scene, seed: int, scale: float = 1.0) -> AttentionInputs:
        generator = draw_seed(self.subject.seed, str(self.variant), scene.name, seed)
        module = attention_of(self.stock)
        low, high = scene.length
        length = low + 2 * int(torch.randint((high - low) // 2 + 1, (1,), generator=generator))
        queries, batch = scene.queries or length, 2
        heads = zoo.HEADS
        kv_heads = heads // getattr(module, "num_key_value_groups", 1)
        head = getattr(module, "qk_head_dim", None) or module.head_dim
        value_head = getattr(module, "v_head_dim", None) or head

        def draw(tokens: int, count: int, width: int) -> Tensor:
            # as a model makes them: (B, S, heads, D) seen as (B, heads, S, D)
            return torch.randn(batch, tokens, count, width, generator=generator).to(self.dtype).transpose(1, 2)

        padding = sequence = None
        positions = torch.arange(length - queries, length).expand(batch, queries).clone()
        if scene.padding is not None:
            padding = torch.ones(batch, length, dtype=torch.long)
            cut = 3 + int(torch.randint(5, (1,), generator=generator))
            padding[0, slice(0, cut) if scene.padding == "left" else slice(length - cut, None)] = 0
        if scene.packed:
            cut = length // 3
            sequence = (torch.arange(length) >= cut).long().expand(batch, length)
            positions[:, cut:] -= cut
        query, key = scale * draw(queries, heads, head), draw(length, kv_heads, head)
        value = draw(length, kv_heads, value_head)
        cotangent = torch.randn(batch, queries, heads, value_head, generator=generator).to(self.dtype)
        inputs = AttentionInputs(
            query=query,
            key=key,
            value=value,
            cotangent=cotangent,
            padding=padding,
            positions=positions,
            sequence=sequence,
        )
        cotangent[~inputs.real] = 0
        return inputs

    def measures_of(
        self, scene: Scene, names: Sequence[str], *, backward: bool, scale: float = 1.0, call: Any = None
    ) -> list[Measure]:
        """Compare tensors of one scene over `SEEDS` draws."""
        key = (f"{scene.name} x{scale:g} {call is not None}", backward)
        if key not in self._runs:
            runs = []
            for seed in range(SEEDS):
                inputs = self.inputs(scene, seed, scale)
                model = self.backed(training=backward)
                runs.append(
                    (
                        inputs,
                        run_attention(self.layout, model, inputs, backward=backward, call=call),
                        run_attention(self.layout, self.stock, inputs, backward=backward),
                        run_reference(self.layout, self.stock, inputs, backward=backward),
                    )
                )
            self._runs[key] = runs
        case = scene.name + (f", scores x{scale:g}" if scale != 1 else "")
        return [self._measure(name, case, self._runs[key]) for name in names]

    def _measure(self, name: str, case: str, runs: Sequence[tuple[AttentionInputs, Any, Any, Any]]) -> Measure:
        got, eager, expected = [], [], []
        for inputs, *three in runs:
            ours, theirs, wanted = (found[name] for found in three)
            require(ours is not None, f"{name} ({case}): there is no gradient")
            shapes = tuple(ours.shape), tuple(wanted.shape)
            require(shapes[0] == shapes[1], f"{name} ({case}) has shape {shapes[0]}, expected {shapes[1]}")
            require(ours.dtype == theirs.dtype, f"{name} ({case}) is {ours.dtype}, that of eager is {theirs.dtype}")
            pick = partial(_real_rows, inputs.real) if name == "y" else lambda tensor: tensor
            got.append(pick(ours))
            eager.append(pick(theirs))
            expected.append(pick(wanted))
        return measure(name, case, got, eager, expected)


def _real_rows(real: Tensor, y: Tensor) -> Tensor:
    return y[real.to(y.device)]


def attention_of(model: nn.Module) -> Any:
    """The model's attention module."""
    return next(m for m in model.modules() if hasattr(m, "is_causal") and hasattr(m, "scaling"))


def mask_of(layout: AttentionLayout, module: Any, inputs: AttentionInputs) -> Any:
    """The mask that the model would make under its present attention implementation."""
    batch, _, queries, _ = inputs.query.shape
    device = next(module.parameters()).device
    embeds = torch.empty(batch, queries, 1, dtype=inputs.query.dtype, device=device)
    padding = None if inputs.padding is None else inputs.padding.to(device)
    if "bidirectional" in layout.features:
        return create_bidirectional_mask(module.config, embeds, padding)
    cached = inputs.key.shape[2] - queries
    cache = None
    if cached:
        cache = DynamicCache()
        past = inputs.key[:, :, :cached].to(device)
        cache.update(past, past, 0)
    create = create_sliding_window_causal_mask if "sliding_window" in layout.features else create_causal_mask
    return create(module.config, embeds, padding, cache, inputs.positions.to(device))


def run_attention(
    layout: AttentionLayout, model: nn.Module, inputs: AttentionInputs, *, backward: bool, call: Any = None
) -> dict[str, Tensor | None]:
    """`y` and gradients of the attention function that the model's config names."""
    module = attention_of(model)
    device = next(module.parameters()).device
    eager = sys.modules[type(module).__module__].eager_attention_forward
    function = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, eager)
    if call is not None:
        function = call(function)
    query, key, value = (
        t.detach().to(device).requires_grad_(backward) for t in (inputs.query, inputs.key, inputs.value)
    )
    passed = {name: getattr(module, attribute) for name, attribute in layout.passes.items()}
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(backward):
        y, _ = function(
            module,
            query,
            key,
            value,
            mask_of(layout, module, inputs),
            dropout=0.0,
            scaling=module.scaling,
            position_ids=inputs.positions.to(device),
            **passed,
        )
    found: dict[str, Tensor | None] = {"y": y.detach()}
    if backward:
        y.backward(inputs.cotangent.to(device))
        found |= {"dQ": query.grad, "dK": key.grad, "dV": value.grad}
        if "s_aux" in passed:
            found["d_sinks"] = passed["s_aux"].grad
    return found


def run_reference(
    layout: AttentionLayout, model: nn.Module, inputs: AttentionInputs, *, backward: bool
) -> dict[str, Tensor | None]:
    module = attention_of(model)
    sinks = module.sinks if "s_aux" in layout.passes else None
    query, key, value, sinks = reference.raise_to_double(inputs.query, inputs.key, inputs.value, sinks, grad=backward)
    allowed = reference.visible(
        query.shape[2],
        key.shape[2],
        causal="bidirectional" not in layout.features,
        window=WINDOW if "sliding_window" in layout.features else None,
        padding=inputs.padding,
        sequence=inputs.sequence,
    ).expand(query.shape[0], -1, -1)
    with torch.set_grad_enabled(backward):
        y = reference.attention(
            query,
            key,
            value,
            allowed,
            scale=module.scaling,
            softcap=getattr(module, layout.passes["softcap"]) if "softcap" in layout.passes else None,
            sinks=sinks,
        )
    found: dict[str, Tensor | None] = {"y": y.detach()}
    if backward:
        torch.autograd.backward(y, inputs.cotangent.double())
        found |= {"dQ": query.grad, "dK": key.grad, "dV": value.grad, "d_sinks": None if sinks is None else sinks.grad}
    return found


attention_check = partial(check, kind="attn", bench=AttentionBench)
training_check = partial(attention_check, tier="training")
CAUSAL = ("causal", "gqa", "sliding", "sinks", "sinks_sliding", "softcap", "mla")
SINKS = ("sinks", "sinks_sliding")


@attention_check("forward")
def forward(bench: AttentionBench) -> None:
    """Short sequences, and long ones beyond any block."""
    bench.judge(m for scene in (PLAIN, LONG) for m in bench.measures_of(scene, ["y"], backward=False))


@attention_check("padding/left")
def padding_left(bench: AttentionBench) -> None:
    """Padding before a sequence, as in generation."""
    bench.judge(bench.measures_of(LEFT, ["y"], backward=False))


@attention_check("padding/right")
def padding_right(bench: AttentionBench) -> None:
    """Padding after a sequence, as in training."""
    bench.judge(bench.measures_of(RIGHT, ["y"], backward=False))


@attention_check("packed", layouts=CAUSAL)
def packed(bench: AttentionBench) -> None:
    """Packed sequences do not see one another."""
    bench.judge(bench.measures_of(PACKED, ["y"], backward=False))


@attention_check("cache", layouts=CAUSAL)
def cached(bench: AttentionBench) -> None:
    """One query, and a few, after keys that were cached."""
    bench.judge(m for scene in (DECODE, CHUNK) for m in bench.measures_of(scene, ["y"], backward=False))


def _gradient(tensor: str, bench: AttentionBench) -> None:
    scenes = [PLAIN, LONG, RIGHT]
    bench.judge(m for scene in scenes for m in bench.measures_of(scene, [tensor], backward=True))


for _tensor in ("dQ", "dK", "dV"):
    training_check(f"grad/{_tensor}")(partial(_gradient, _tensor))
training_check("grad/d_sinks", layouts=SINKS)(partial(_gradient, "d_sinks"))


@training_check("grad/packed", layouts=CAUSAL)
def packed_gradients(bench: AttentionBench) -> None:
    """The gradients of packed sequences."""
    bench.judge(bench.measures_of(PACKED, ["dQ", "dK", "dV"], backward=True))


@attention_check("edge/large_scores")
def large_scores(bench: AttentionBench) -> None:
    """Scores in the hundreds, where a softmax without its maximum taken off overflows."""
    bench.judge(bench.measures_of(PLAIN, ["y"], backward=False, scale=100.0))


@attention_check("mode/repeat", needs={"deterministic"})
def repeat(bench: AttentionBench) -> None:
    """The same call gives the same bits."""
    inputs = bench.inputs(LONG, 0)
    runs = [run_attention(bench.layout, bench.backed(), inputs, backward=False)["y"] for _ in range(4)]
    require(
        all(torch.equal(y, runs[0]) for y in runs if y is not None and runs[0] is not None), "y differs between calls"
    )


@training_check("mode/compile", needs={"compile"}, layouts=("gqa", "sinks"))
def compiled(bench: AttentionBench) -> None:
    """`torch.compile(fullgraph=True)`, forward and backward."""
    torch._dynamo.reset()
    backend = "inductor" if bench.subject.device == "cuda" else "aot_eager"
    call = partial(torch.compile, fullgraph=True, backend=backend)
    bench.judge(bench.measures_of(PLAIN, ["y", "dQ", "dK", "dV"], backward=True, call=call))


@attention_check("mode/switch")
def switch(bench: AttentionBench) -> None:
    """To the backend and back to stock: stock computes what it did, bit for bit."""
    model, inputs = copy.deepcopy(bench.stock), bench.inputs(PLAIN, 0)
    before = run_attention(bench.layout, model, inputs, backward=False)["y"]
    bench.put_in_place(model)
    run_attention(bench.layout, model, inputs, backward=False)
    reset_moe_backend(model)
    after = run_attention(bench.layout, model, inputs, backward=False)["y"]
    assert before is not None and after is not None
    require(torch.equal(before, after), "after a reset the stock model computes something else than before")
