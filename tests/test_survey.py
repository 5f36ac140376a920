"""Survey finds the sites of every kind in every family, and what each demands is what the model then does."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from hf_moe_conformance import zoo
from hf_moe_conformance.zoo import EXPERTS, FFN, HEAD, HEADS, HIDDEN, KV_HEADS, MOE_FFN, TOP_K, VOCABULARY
from model_state import changes, state
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_moe_backends import BackendConfig, BackendUnavailable, plan_moe_backend, reset_moe_backend, set_moe_backend
from hf_moe_backends.spec import FEATURES, KINDS
from hf_moe_backends.survey import UNDISPATCHED, Site, survey

V17 = transformers.__version__.startswith("5.17")

GPT_OSS = "gpt_oss(limit=7, alpha=1.702)"
EXPECTED: dict[str, tuple[str, str]] = {
    "gpt_oss": ("transposed interleaved bias", GPT_OSS),
    "openai_privacy_filter": ("transposed bias", GPT_OSS),
    "aria_text": ("transposed", "swiglu"),
    "nemotron_h": ("ungated", "relu2"),
    "muse_spark_text": ("post_expert_norm", "swiglu"),
    **dict.fromkeys(("deepseek_v4", "glm5_next_text", "hy_v4", "hy_v4_vl_text"), ("", "swiglu_clamped(limit=10)")),
    "minimax_m3_vl_text": ("", GPT_OSS),
    **dict.fromkeys(("inkling2_text", "inkling2_loop_text"), ("", "custom")),
    **dict.fromkeys(("gemma4_text", "diffusion_gemma_text"), ("", "geglu_tanh")),
}
"""The families whose experts are not in the default layout with SwiGLU, from their documentation."""

NO_MOE_FFN = (
    *(
        "aria_text",
        "cohere2_moe",
        "flex_olmo",
        "gpt_oss",
        "granitemoe",
        "granitemoe_swa",
        "granitemoehybrid",
        "granitemoeshared",
    ),
    *("hunyuan_v1_moe", "jamba", "minimax", "minimax_m2", "minimax_m3_vl_text", "mixtral", "olmoe"),
    *("openai_privacy_filter", "phimoe"),
)
"""The families whose config has one intermediate size only."""

LINEAR_ROUTERS = {
    "afmoe": ["mlp.router.gate"],
    "diffusion_gemma_text": ["router.proj"],
    "gemma4_text": ["router.proj"],
    "hunyuan_v1_moe": ["mlp.gate.wg"],
    **({"jamba": ["feed_forward.router"]} if V17 else {}),
}
"""The families whose router's projection is a plain linear layer, by the end of its name. The others' is a class."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Models as small as these are faster without threads waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def built(family: str) -> Any:
    """A model that no test changes."""
    return zoo.build(family)


@cache
def surveyed(family: str) -> dict[Any, tuple[Site, ...]]:
    return survey(built(family))


@pytest.fixture(params=zoo.families())
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[f for f in zoo.families() if zoo.experts_modules(built(f))])
def dispatched(request: pytest.FixtureRequest) -> str:
    return request.param


def intermediate_sizes(family: str) -> set[int]:
    if family == "ernie4_5_vl_moe_text":
        return {MOE_FFN, MOE_FFN // 2}  # text and vision experts
    return {FFN if family in NO_MOE_FFN else MOE_FFN}


class TestExperts:
    def test_demands(self, dispatched: str) -> None:
        features, gate = EXPECTED.get(dispatched, ("", "swiglu"))
        sites = surveyed(dispatched)["experts"]
        assert [site.module for site in sites] == zoo.experts_modules(built(dispatched))
        modules = dict(built(dispatched).named_modules())
        assert all(modules[site.name] is site.module for site in sites)
        for demand in (site.demand for site in sites):
            assert demand.features == set(features.split())
            assert str(demand.gate) == gate
            assert demand.count == EXPERTS
            assert (demand.device, demand.dtype, demand.sharding, demand.blocked) == ("cpu", "float32", None, None)
            hidden = built(dispatched).config.moe_hidden_size if dispatched == "muse_spark_text" else HIDDEN
            assert demand.sizes["hidden"] == hidden
        assert {site.demand.sizes["intermediate"] for site in sites} == intermediate_sizes(dispatched)

    def test_every_experts_module_is_called(self, dispatched: str) -> None:
        """So that no site is one that the model keeps for something else."""
        model, called = built(dispatched), []
        hooks = [
            s.module.register_forward_hook(lambda m, *_: called.append(m)) for s in surveyed(dispatched)["experts"]
        ]
        with torch.no_grad():
            zoo.output(model, zoo.sample_inputs(model))
        for hook in hooks:
            hook.remove()
        silent = [s.name for s in surveyed(dispatched)["experts"] if s.module not in called]
        # text does not reach the vision experts
        assert silent == (["layers.1.mlp.vision_moe.experts"] if dispatched == "ernie4_5_vl_moe_text" else [])


def handed_over(model: Any, monkeypatch: pytest.MonkeyPatch) -> dict[nn.Module, tuple[set[str], tuple[int, int]]]:
    """What each attention module hands to its function, in the survey's words, and its query and value head sizes."""
    found: dict[nn.Module, tuple[set[str], tuple[int, int]]] = {}
    real = type(ALL_ATTENTION_FUNCTIONS).get_interface

    def get_interface(self: Any, name: str, default: Any) -> Callable[..., Any]:
        function = real(self, name, default)

        def spy(module: nn.Module, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            features = {
                "sinks": kwargs.get("s_aux") is not None,
                "softcap": kwargs.get("softcap") is not None,
                "sliding_window": kwargs.get("sliding_window") is not None,
                "sparse_indices": "indices" in kwargs or "block_indices" in kwargs,
                "mla": query.shape[-1] != value.shape[-1],
                "gqa": query.shape[1] != key.shape[1],
                "bidirectional": not getattr(module, "is_causal", True),
            }
            found[module] = {n for n, present in features.items() if present}, (query.shape[-1], value.shape[-1])
            return function(module, query, key, value, *args, **kwargs)

        return spy

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(type(ALL_ATTENTION_FUNCTIONS), "get_interface", get_interface)
        zoo.output(model, zoo.sample_inputs(model))
    return found


class TestAttention:
    def test_demands(self, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Held against what the modules hand over when the model runs."""
        sites = {site.module: site for site in surveyed(family)["attn"]}
        found = handed_over(built(family), monkeypatch)
        assert found.keys() <= sites.keys()
        for module, (features, (head, value_head)) in found.items():
            demand = sites[module].demand
            assert demand.features == features, sites[module].name
            if "head" not in demand.sizes:  # attention over blocks of layers, whose module does not say its head size
                assert type(module).__name__.endswith("AttentionResidual")
                continue
            assert demand.sizes["head"] == head
            assert demand.sizes.get("value head", head) == value_head
        # a family's one kind of attention that text alone does not run
        silent = {type(module).__name__ for module in sites.keys() - found.keys()}
        assert silent <= {"Inkling2LoopMessageAttentionResidual"}

    def test_the_ones_that_matter_are_there(self) -> None:
        """The comparison above would also hold for a survey and a model that know nothing."""
        having = {
            feature: {f for f in zoo.families() if any(feature in s.demand.features for s in surveyed(f)["attn"])}
            for feature in FEATURES["attn"]
        }
        assert {"gpt_oss", "openai_privacy_filter", "hy_v4"} <= having["sinks"]
        assert {"gpt_oss", "mixtral", "minimax", "gemma4_text"} <= having["sliding_window"]
        assert {"deepseek_v2", "deepseek_v3", "mistral4"} <= having["mla"]
        assert {"qwen3_moe", "mixtral", "gpt_oss"} <= having["gqa"]
        assert {"deepseek_v32", "glm_moe_dsa"} <= having["sparse_indices"]
        assert {"openai_privacy_filter"} <= having["bidirectional"]

    def test_a_sliding_window_in_some_layers(self) -> None:
        first, second = surveyed("gpt_oss")["attn"]
        assert "sliding_window" in first.demand.features and "sliding_window" not in second.demand.features

    @pytest.mark.parametrize("window", [None, 16])
    def test_a_sliding_window_that_only_the_config_has(self, window: int | None) -> None:
        for site in survey(zoo.build("mixtral", sliding_window=window))["attn"]:
            assert ("sliding_window" in site.demand.features) == (window is not None)

    def test_a_softcap(self) -> None:
        """No MoE family has one today."""
        config = transformers.Gemma2Config(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=FFN,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD,
            sliding_window=8,
        )
        for softcap in (None, 50.0):
            config.attn_logit_softcapping = softcap
            sites = survey(transformers.Gemma2ForCausalLM._from_config(config))["attn"]
            assert len(sites) == 2
            assert [("softcap" in s.demand.features) for s in sites] == [softcap is not None] * 2

    @pytest.mark.parametrize("is_sliding", [True, False])
    def test_a_sliding_window_on_a_condition(self, is_sliding: bool) -> None:
        class Attention(nn.Module):
            sliding_window = 16

            def forward(self, q: Any, k: Any, v: Any) -> Any:
                attend = ALL_ATTENTION_FUNCTIONS.get_interface("eager", None)
                return attend(self, q, k, v, sliding_window=self.sliding_window if self.is_sliding else None)

        module = Attention()
        module.is_sliding = is_sliding  # type: ignore[assignment]
        (site,) = survey(module)["attn"]
        assert ("sliding_window" in site.demand.features) == is_sliding

    def test_a_source_that_cannot_be_read_demands_the_most(self) -> None:
        class Attention(nn.Module):
            is_causal = True

            def forward(self, q: Any, k: Any, v: Any) -> Any:
                attend = ALL_ATTENTION_FUNCTIONS.get_interface("eager", None)
                return attend(self, q, k, v, sliding_window=max(8, 16), softcap=None, s_aux=self.absent)

        (site,) = survey(Attention())["attn"]
        assert site.demand.features == {"sliding_window"}


class TestOthers:
    def test_linear(self, family: str) -> None:
        model, sites = built(family), surveyed(family)["linear"]
        assert [s.module for s in sites] == [m for m in model.modules() if type(m) is nn.Linear]
        for site in sites:
            module: Any = site.module
            assert site.demand.sizes == {"in": module.weight.shape[1], "out": module.weight.shape[0]}
            assert ("bias" in site.demand.features) == (f"{site.name}.bias" in dict(model.named_parameters()))
            assert site.demand.blocked is None
        heads = [site.name for site in sites if "head" in site.demand.features]
        assert heads == [n for n, m in model.named_modules() if type(m) is nn.Linear and n.endswith("lm_head")]
        routers = [site.name for site in sites if "router" in site.demand.features]
        ends = tuple(LINEAR_ROUTERS.get(family, ["there is none"]))
        assert routers == [name for name, _ in model.named_modules() if name.endswith(ends)]
        assert bool(routers) == (family in LINEAR_ROUTERS)

    def test_norm(self, family: str) -> None:
        """Every module that is called a norm, holds no others and has a weight or nothing, with its width and eps."""
        model, sites = built(family), surveyed(family)["norm"]
        named = [m for m in model.modules() if "norm" in type(m).__name__.lower() and not list(m.children())]
        assert [s.module for s in sites] == [m for m in named if hasattr(m, "weight") or not list(m.parameters())]
        for site in sites:
            module: Any = site.module
            weights = dict(module.named_parameters())
            assert ("unweighted" in site.demand.features) <= (not weights)
            if weights:
                assert site.demand.sizes == {"width": module.weight.shape[-1]}
            if site.demand.norm.formula != "custom":
                assert site.demand.norm.eps in [v for v in vars(module).values() if isinstance(v, float)]
            assert ("layer_norm" in site.demand.features) == (type(module) is nn.LayerNorm)

    def test_most_norms_are_recognised(self) -> None:
        formulas = Counter(s.demand.norm.formula for f in zoo.families() for s in surveyed(f)["norm"])
        assert formulas["custom"] < 0.12 * formulas.total()
        assert formulas["rms"] > 0.8 * formulas.total()

    @pytest.mark.parametrize(
        ("family", "zero_centred", "cast"),
        [
            ("qwen3_moe", False, True),
            ("mixtral", False, True),
            ("gpt_oss", False, False),
            ("qwen3_next", True, False),
            ("muse_spark_text", True, False),
        ],
    )
    def test_the_kind_of_a_familys_norms(self, family: str, zero_centred: bool, cast: bool) -> None:
        if not zoo.available(family):
            assert V17
            return
        (layer,) = [s for s in surveyed(family)["norm"] if s.name.endswith("layers.0.input_layernorm")]
        norm = layer.demand.norm
        assert (norm.formula, norm.weighted, norm.zero_centred, norm.cast_before_weight) == (
            "rms",
            True,
            zero_centred,
            cast,
        )
        assert ("zero_centred" in layer.demand.features) == zero_centred

    def test_loss(self, family: str) -> None:
        sites = surveyed(family)["loss"]
        assert [s.name for s in sites] == ([""] if hasattr(built(family), "lm_head") else [])
        assert all(s.demand.dtype == "float32" and s.demand.device == "cpu" for s in sites)

    def test_nothing_is_sharded(self, family: str) -> None:
        assert surveyed(family)["dispatcher"] == ()
        assert all(s.demand.sharding is None for kind in KINDS for s in surveyed(family)[kind])


def demands(sites: dict[Any, tuple[Site, ...]]) -> list[tuple[str, str, Any]]:
    """All of it, but for where it is."""
    return [(kind, s.name, dataclasses.replace(s.demand, device="")) for kind in KINDS for s in sites[kind]]


class TestWhereItIs:
    def test_on_meta_as_on_cpu(self, family: str) -> None:
        # not `.to("meta")`, which some families' own rotary modules copy themselves out of
        with torch.device("meta"):
            model = type(built(family))._from_config(copy.deepcopy(built(family).config)).eval()
        sites = survey(model)
        assert {s.demand.device for kind in KINDS for s in sites[kind] if list(s.module.parameters())} == {"meta"}
        assert demands(sites) == demands(surveyed(family))

    def test_nothing_changes(self, family: str) -> None:
        model = built(family)
        before, random = state(model), torch.get_rng_state()
        versions = [p._version for p in model.parameters()]
        survey(model)
        assert changes(model, before) == []
        assert [p._version for p in model.parameters()] == versions
        assert torch.equal(torch.get_rng_state(), random)
        assert all(p.grad is None for p in model.parameters())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_the_dtype(self, dtype: torch.dtype) -> None:
        sites = survey(zoo.build("qwen3_moe").to(dtype))
        assert {s.demand.dtype for kind in KINDS for s in sites[kind]} == {str(dtype).removeprefix("torch.")}

    def test_the_dtype_of_each(self) -> None:
        model = zoo.build("qwen3_moe").bfloat16()
        model.model.layers[1].mlp.experts.float()
        assert [s.demand.dtype for s in survey(model)["experts"]] == ["bfloat16", "float32"]

    def test_the_mode_of_each(self) -> None:
        model = zoo.build("qwen3_moe")
        model.model.layers[1].train()
        sites = survey(model)
        assert all(s.demand.training == (".layers.1." in s.name) for kind in KINDS for s in sites[kind])
        assert len(sites["experts"]) == 2

    def test_a_module_that_is_used_twice(self) -> None:
        model = zoo.build("qwen3_moe")
        model.model.layers[1] = model.model.layers[0]
        sites = survey(model)
        assert [len(sites[kind]) for kind in ("experts", "attn", "linear", "norm")] == [1, 1, 5, 5]

    def test_a_model_without_any(self) -> None:
        assert survey(nn.Sequential(nn.ReLU())) == dict.fromkeys(KINDS, ())


class TestSharded:
    @pytest.fixture
    def mesh(self) -> Iterator[Any]:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield dist.device_mesh.init_device_mesh("cpu", (1,))
        dist.destroy_process_group()

    def test_expert_parallel(self) -> None:
        model = zoo.build("qwen3_moe")
        experts = model.model.layers[1].mlp.experts
        experts._is_expert_parallel = True
        sites = survey(model)
        assert [s.demand.sharding for s in sites["experts"]] == [None, "ep"]
        assert ["sentinels" in s.demand.features for s in sites["experts"]] == [False, True]
        assert [s.name for s in sites["dispatcher"]] == ["model.layers.1.mlp.experts"]
        assert sites["dispatcher"][0].demand.sharding == "ep"

    @pytest.mark.parametrize("style", ["EpDispatchExpertsParallel", "MoeExpertsParallel"])
    def test_expert_parallel_before_it_was_marked(self, style: str) -> None:
        """Transformers 5.17 sets no attribute, but its forward is a closure of the style."""
        model = zoo.build("qwen3_moe")
        experts = model.model.layers[0].mlp.experts

        def forward(*_: Any) -> None: ...

        forward.__qualname__ = f"{style}.install_forward.<locals>.forward"
        experts.forward = forward
        assert [s.demand.sharding for s in survey(model)["experts"]] == ["ep", None]

    def test_dtensors(self, mesh: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        model = zoo.build("qwen3_moe")
        fully_shard(model.model.layers[0], mesh=mesh)
        sites = survey(model)
        for kind in ("experts", "linear", "norm"):
            for site in sites[kind]:
                within = site.name.startswith("model.layers.0.")
                assert site.demand.sharding == ("fsdp2" if within else None), site.name
                assert bool(site.demand.blocked) == (within and kind != "experts")
        # the whole matrices, not a rank's share
        assert demands_of(sites["experts"]) == demands_of(surveyed("qwen3_moe")["experts"])


def demands_of(sites: tuple[Site, ...]) -> list[Any]:
    return [(s.demand.sizes, s.demand.count, s.demand.gate) for s in sites]


class TestLora:
    peft = pytest.importorskip("peft")
    # peft goes by a name that Transformers 5.24 renames
    pytestmark = pytest.mark.filterwarnings("ignore:.*activation_checkpointing:FutureWarning")

    def test_experts_of_an_adapter(self) -> None:
        settings = self.peft.LoraConfig(
            r=2, target_modules=[], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        )
        model = self.peft.get_peft_model(zoo.build("gpt_oss"), settings)
        sites = survey(model)["experts"]
        assert [s.module for s in sites] == zoo.experts_modules(model)
        assert demands_of(sites) == demands_of(surveyed("gpt_oss")["experts"])

    def test_parametrized_experts(self) -> None:
        """Their class is another, their weights are no Parameters, and to compute them takes the memory of all."""

        class Never(nn.Module):
            armed = False

            def forward(self, weight: Any) -> Any:
                assert not self.armed, "a weight was computed to look at its shape"
                return weight

        model, never = zoo.build("gpt_oss"), Never()
        experts = model.model.layers[0].mlp.experts
        for name in ("gate_up_proj", "down_proj"):
            nn.utils.parametrize.register_parametrization(experts, name, never)
        never.armed = True
        assert type(experts).__name__ == "ParametrizedGptOssExperts"
        first, second = survey(model)["experts"]
        assert first.module is experts
        assert first.demand.features == second.demand.features | {"parametrized"}
        assert demands_of((first,)) == demands_of((second,))
        assert (first.demand.dtype, first.demand.device) == ("float32", "cpu")

    def test_linear_layers_of_an_adapter(self) -> None:
        """Its own are layers like others; the one within is where the weight is."""
        settings = self.peft.LoraConfig(r=2, target_modules=["q_proj"])
        model = self.peft.get_peft_model(zoo.build("qwen3_moe"), settings)
        names = [s.name for s in survey(model)["linear"] if ".layers.0.self_attn.q_proj" in s.name]
        assert [name.rpartition("q_proj.")[2] for name in names] == ["base_layer", "lora_A.default", "lora_B.default"]


def text(family: str) -> dict[str, Any]:
    return zoo.config(family).to_dict()


VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def llava() -> Any:
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
        projection_dim=16,
    )
    config = LlavaConfig(vision_config=vision, text_config=zoo.config("mixtral"), image_token_index=5)
    return LlavaForConditionalGeneration._from_config(config)


def qwen3_vl_moe() -> Any:
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    vision = VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    config = Qwen3VLMoeConfig(text_config=text("qwen3_vl_moe_text"), vision_config=vision)
    return Qwen3VLMoeForConditionalGeneration._from_config(config)


def ernie4_5_vl_moe() -> Any:
    from transformers import Ernie4_5_VLMoeConfig, Ernie4_5_VLMoeForConditionalGeneration

    vision = {name: value for name, value in VISION.items() if name not in ("out_hidden_size", "temporal_patch_size")}
    config = Ernie4_5_VLMoeConfig(
        text_config=text("ernie4_5_vl_moe_text"), vision_config=vision | {"temporal_merge_size": 2}
    )
    return Ernie4_5_VLMoeForConditionalGeneration._from_config(config)


def glm4v_moe() -> Any:
    from transformers import Glm4vMoeConfig, Glm4vMoeForConditionalGeneration

    config = Glm4vMoeConfig(text_config=text("glm4v_moe_text"), vision_config=VISION | {"image_size": 16})
    return Glm4vMoeForConditionalGeneration._from_config(config)


def step3p7() -> Any:
    modeling = pytest.importorskip("transformers.models.step3p7.modeling_step3p7")
    language = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "num_experts_per_tok": TOP_K,
        "num_local_experts": EXPERTS,
        "n_routed_experts": EXPERTS,
        "moe_intermediate_size": MOE_FFN,
        "share_expert_dim": MOE_FFN,
        "mlp_layer_types": ["dense", "sparse"],
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 8,
        "pad_token_id": 0,
    }
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "image_size": 16,
        "patch_size": 4,
    }
    config = modeling.Step3p7Config(text_config=language, vision_config=vision)
    return modeling.Step3p7ForConditionalGeneration._from_config(config)


def qwen3_omni_moe() -> Any:
    from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

    audio = {
        "num_mel_bins": 16,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "d_model": 32,
        "output_dim": HIDDEN,
        "n_window": 4,
        "downsample_hidden_size": 8,
        "max_source_positions": 32,
    }
    code_predictor = {
        "vocab_size": 64,
        "hidden_size": HIDDEN,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": HEAD,
        "num_code_groups": 3,
    }
    code2wav = {
        "codebook_size": 16,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "decoder_dim": 32,
        "upsample_rates": [2],
        "upsampling_ratios": [2],
        "num_quantizers": 3,
    }
    vision = VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    config = Qwen3OmniMoeConfig(
        thinker_config={
            "text_config": text("qwen3_omni_thinker_text"),
            "vision_config": vision,
            "audio_config": audio,
        },
        talker_config={
            "text_config": text("qwen3_omni_talker_text"),
            "code_predictor_config": code_predictor,
            "thinker_hidden_size": HIDDEN,
            "num_code_groups": 3,
            "accept_hidden_layer": 1,
            "spatial_merge_size": 2,
        },
        code2wav_config=code2wav,
        enable_audio_output=True,
    )
    return Qwen3OmniMoeForConditionalGeneration._from_config(config)


LANGUAGE = "model.language_model.layers"
COMPOSITES: dict[str, tuple[Callable[[], Any], dict[str, int], int, str]] = {
    "llava": (llava, {f"{LANGUAGE}.{i}.mlp.experts": FFN for i in (0, 1)}, 4, "vision_tower"),
    "qwen3_vl_moe": (qwen3_vl_moe, {f"{LANGUAGE}.{i}.mlp.experts": MOE_FFN for i in (0, 1)}, 4, "visual"),
    "ernie4_5_vl_moe": (
        ernie4_5_vl_moe,
        {
            f"{LANGUAGE}.1.mlp.text_moe.experts": MOE_FFN,
            f"{LANGUAGE}.1.mlp.vision_moe.experts": MOE_FFN // 2,
        },
        4,
        "vision_tower",
    ),
    "glm4v_moe": (glm4v_moe, {f"{LANGUAGE}.1.mlp.experts": MOE_FFN}, 4, "visual"),
    "step3p7": (step3p7, {f"{LANGUAGE}.1.mlp.experts": MOE_FFN}, 3, "vision"),
    "qwen3_omni_moe": (
        qwen3_omni_moe,
        {
            f"{part}.{i}.mlp.experts": MOE_FFN
            for part in (f"thinker.model{'' if V17 else '.language_model'}.layers", "talker.model.layers")
            for i in (0, 1)
        },
        # thinker: text 2, vision 2, audio 1; talker: text 2, code predictor 1; code to waveform 1
        9,
        "visual",
    ),
}
"""Builder, the experts' names and intermediate sizes, the number of attention modules, a part of the vision's name."""


class TestComposites:
    @pytest.mark.parametrize("name", COMPOSITES)
    def test_sites_of_all_parts(self, name: str) -> None:
        build, experts, attention, vision = COMPOSITES[name]
        model = build().eval()
        sites = survey(model)
        assert {s.name: s.demand.sizes["intermediate"] for s in sites["experts"]} == experts
        for site in sites["experts"]:
            assert (site.demand.count, site.demand.sizes["hidden"]) == (EXPERTS, HIDDEN)
            assert str(site.demand.gate) == "swiglu"
            assert site.demand.features == ({"late_dispatch"} if name == "step3p7" else set())
        assert len(sites["attn"]) == attention
        for kind in ("attn", "linear", "norm"):
            of_vision = [vision in site.name for site in sites[kind]]
            assert any(of_vision) and not all(of_vision)

        before = state(model)
        set_moe_backend(model, BackendConfig(experts="torch_mm"))
        assert {s.module.config._experts_implementation for s in sites["experts"]} == {"torch_mm"}
        reset_moe_backend(model)
        assert changes(model, before) == []

    def test_on_meta_as_on_cpu(self) -> None:
        with torch.device("meta"):
            model = qwen3_omni_moe().eval()
        assert demands(survey(model)) == demands(survey(qwen3_omni_moe().eval()))

    def test_a_part_alone(self) -> None:
        model = qwen3_omni_moe()
        assert [s.name for s in survey(model.talker)["experts"]] == [f"model.layers.{i}.mlp.experts" for i in (0, 1)]


SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
UNSERVED: dict[str, tuple[str, str, dict[str, Any], str, int]] = {
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        SMALL
        | {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 32,
            "intermediate_size_mlp": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
        },
        "it runs every expert on every token in one dense product",
        2,
    ),
    "dbrx": (
        "DbrxConfig",
        "DbrxForCausalLM",
        {
            "d_model": HIDDEN,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            "vocab_size": VOCABULARY,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": HIDDEN},
            "pad_token_id": 0,
        },
        "it keeps w1, v1 and w2 as (experts * intermediate, hidden)",
        2,
    ),
    "jetmoe": (
        "JetMoeConfig",
        "JetMoeForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "kv_channels": 16,
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "pad_token_id": 0,
        },
        "it routes attention heads as well",
        8,
    ),
    "longcat_flash": (
        "LongcatFlashConfig",
        "LongcatFlashForCausalLM",
        SMALL
        | {
            "num_layers": 1,
            "ffn_hidden_size": 32,
            "expert_ffn_hidden_size": 16,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "head_dim": 16,
            "moe_topk": 2,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
        },
        "it mixes identity experts into the routing",
        1,
    ),
    "switch_transformers": (
        "SwitchTransformersConfig",
        "SwitchTransformersForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": HIDDEN,
            "d_kv": 16,
            "d_ff": 32,
            "num_layers": 2,
            "num_sparse_encoder_layers": 1,
            "num_decoder_layers": 2,
            "num_sparse_decoder_layers": 1,
            "num_heads": 4,
            "num_experts": 4,
            "pad_token_id": 0,
        },
        "its experts are separate modules, with a capacity that drops tokens",
        2,
    ),
    "nllb_moe": (
        "NllbMoeConfig",
        "NllbMoeForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": HIDDEN,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "num_experts": 4,
            "encoder_sparse_step": 2,
            "decoder_sparse_step": 2,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
        },
        "its experts are separate modules",
        2,
    ),
    "doge": (
        "DogeConfig",
        "DogeForCausalLM",
        SMALL
        | {
            "intermediate_size": 32,
            "num_key_value_heads": 2,
            "is_moe": True,
            "num_experts": 16,
            "num_experts_per_tok": 4,
        },
        "its experts are rows of an embedding",
        2,
    ),
    "vitpose_backbone": (
        "VitPoseBackboneConfig",
        "VitPoseBackbone",
        {
            "image_size": [16, 16],
            "patch_size": [8, 8],
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_experts": 3,
            "part_features": 8,
        },
        "its experts are separate linear layers, one a data set",
        2,
    ),
}
"""Config class, model class, sizes, the beginning of the reason, the number of sites."""


class TestUnserved:
    """Families that Transformers does not dispatch: `set_experts_implementation` does nothing on them, in silence."""

    @pytest.fixture(params=UNSERVED)
    def name(self, request: pytest.FixtureRequest) -> str:
        return request.param

    def build(self, name: str) -> Any:
        config, model, sizes, *_ = UNSERVED[name]
        return getattr(transformers, model)._from_config(getattr(transformers, config)(**sizes)).eval()

    @pytest.mark.parametrize("backend", ["torch_mm", "loop", "grouped_mm", "eager"])
    def test_a_name_is_refused(self, name: str, backend: str) -> None:
        model = self.build(name)
        before = state(model)
        reason = re.escape(f"{name} does not dispatch its experts: {UNSERVED[name][3]}")
        match = rf"(?s)^experts='{backend}' cannot run this model.*{backend} \(hf-moe-backends .*\): {reason}"
        with pytest.raises(BackendUnavailable, match=match) as caught:
            set_moe_backend(model, BackendConfig(experts=backend))
        assert "usable here: none" in str(caught.value)
        assert changes(model, before) == []

    def test_auto_leaves_it_alone_and_says_why(self, name: str) -> None:
        model = self.build(name)
        *_, reason, count = UNSERVED[name]
        before = state(model)
        plan = set_moe_backend(model, BackendConfig(experts="auto"))
        assert plan.config == BackendConfig()
        (line,) = [line for line in str(plan).splitlines() if line.startswith("  experts:")]
        assert f"{name} does not dispatch its experts: {reason}" in line
        assert line.endswith(f"({count} site{'s' * (count > 1)})")
        assert len(survey(model)["experts"]) == count
        assert plan.edits == ()
        reset_moe_backend(model)
        assert changes(model, before) == []

    def test_other_kinds_can_be_set(self, name: str) -> None:
        plan = plan_moe_backend(self.build(name), BackendConfig(linear="torch", norm="torch"))
        assert plan.config == BackendConfig(linear="torch", norm="torch")

    def test_the_table_has_every_family(self) -> None:
        named = {family for family, _ in UNDISPATCHED.values()}
        assert named >= UNSERVED.keys()
        # aria is dispatched by newer versions; the others are what a quantiser makes of a family
        assert named - UNSERVED.keys() == {"aria", "an FP8 checkpoint", "gpt_oss in MXFP4"}

    def test_a_class_that_nobody_knows(self) -> None:
        """One that looks like experts and is not decorated is named, and not taken for a dense layer."""

        class NewExperts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.num_experts = 2
                self.gate_up_proj = nn.Parameter(torch.empty(2, 8, 4))
                self.down_proj = nn.Parameter(torch.empty(2, 4, 4))

        model = zoo.build("qwen3_moe")
        model.model.layers[0].mlp.experts = NewExperts()
        (first, second) = survey(model)["experts"]
        assert first.demand.blocked == "NewExperts is not decorated with Transformers' @use_experts_implementation"
        assert second.demand.blocked is None
        with pytest.raises(
            BackendUnavailable, match=r"NewExperts is not decorated.*\(at model\.layers\.0\.mlp\.experts\)"
        ):
            set_moe_backend(model, BackendConfig(experts="torch_mm"))
