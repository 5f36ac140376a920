"""Tiny random-weight MoE models of every family that Transformers can dispatch: float32, CPU, seeded, built in a blink.

A family is its config class, its model class and what the generic sizes do not cover. Families that the installed
Transformers does not have are left out by `families()`.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

HIDDEN, HEAD, HEADS, KV_HEADS, FFN, MOE_FFN, EXPERTS, TOP_K, VOCABULARY, LAYERS = 64, 16, 4, 2, 96, 32, 8, 2, 128, 2

# Applied where the config class has the field.
GENERIC: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "intermediate_size": FFN,
    "moe_intermediate_size": MOE_FFN,
    "shared_expert_intermediate_size": MOE_FFN,
    "max_position_embeddings": 256,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token"), TOP_K),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "n_group", "topk_group", "num_expert_group"), 1),
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "qk_head_dim": 32,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
    "sliding_window": 16,
    "num_nextn_predict_layers": 0,
    "num_mtp_layers": 0,
    "attention_dropout": 0.0,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}


class Family(NamedTuple):
    folder: str
    config: str
    model: str
    overrides: dict[str, Any]


FAMILIES: dict[str, Family] = {}


def _family(name: str, config: str, model: str, folder: str | None = None, **overrides: Any) -> None:
    FAMILIES[name] = Family(folder or name, config, model, overrides)


_family("afmoe", "AfmoeConfig", "AfmoeForCausalLM")
_family("aria_text", "AriaTextConfig", "AriaTextForCausalLM", folder="aria")
_family("axk1", "AXK1Config", "AXK1ForCausalLM", num_key_value_heads=HEADS)
_family("axk2", "AXK2Config", "AXK2ForCausalLM", num_key_value_heads=HEADS)
_family("bailing_hybrid", "BailingHybridConfig", "BailingHybridForCausalLM")
_family("beam", "BeamConfig", "BeamForCausalLM", mlp_layer_types=["dense", "sparse"])
_family("cohere2_moe", "Cohere2MoeConfig", "Cohere2MoeForCausalLM")
_family(
    "deepseek_ocr2_text",
    "DeepseekOcr2TextConfig",
    "DeepseekOcr2TextModel",
    folder="deepseek_ocr2",
    mlp_layer_types=["dense", "sparse"],
)
_family("deepseek_v2", "DeepseekV2Config", "DeepseekV2ForCausalLM", num_key_value_heads=HEADS)
_family("deepseek_v3", "DeepseekV3Config", "DeepseekV3ForCausalLM", num_key_value_heads=HEADS)
_family("deepseek_v32", "DeepseekV32Config", "DeepseekV32ForCausalLM", num_key_value_heads=HEADS)
_family("deepseek_v4", "DeepseekV4Config", "DeepseekV4ForCausalLM", mlp_layer_types=["hash_moe", "moe"])
_family(
    "diffusion_gemma_text",
    "DiffusionGemmaTextConfig",
    "DiffusionGemmaEncoderTextModel",
    folder="diffusion_gemma",
    top_k_experts=TOP_K,
    global_head_dim=HEAD,
)
_family("dots1", "Dots1Config", "Dots1ForCausalLM")
_family(
    "dots3_note_text", "Dots3NoteTextConfig", "Dots3NoteForCausalLM", folder="dots3_note", num_key_value_heads=HEADS
)
_family("ernie4_5_moe", "Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM")
_family(
    "ernie4_5_vl_moe_text",
    "Ernie4_5_VLMoeTextConfig",
    "Ernie4_5_VLMoeTextModel",
    folder="ernie4_5_vl_moe",
    moe_intermediate_size=[MOE_FFN, MOE_FFN // 2],
    rope_parameters={"rope_type": "default", "rope_theta": 5e5, "mrope_section": [3, 3, 2]},
)
_family("exaone_moe", "ExaoneMoeConfig", "ExaoneMoeForCausalLM")
_family("flex_olmo", "FlexOlmoConfig", "FlexOlmoForCausalLM")
_family("flint", "FlintConfig", "FlintForCausalLM", mlp_only_layers=[0])
_family(
    "gemma4_text",
    "Gemma4TextConfig",
    "Gemma4ForCausalLM",
    folder="gemma4",
    enable_moe_block=True,
    top_k_experts=TOP_K,
    hidden_size_per_layer_input=0,
    global_head_dim=HEAD,
)
_family("glm4_moe", "Glm4MoeConfig", "Glm4MoeForCausalLM")
_family("glm4_moe_lite", "Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", num_key_value_heads=HEADS)
_family(
    "glm4v_moe_text",
    "Glm4vMoeTextConfig",
    "Glm4vMoeTextModel",
    folder="glm4v_moe",
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
)
_family(
    "glm5_next_text",
    "Glm5NextTextConfig",
    "Glm5NextTextModel",
    folder="glm5_next",
    num_key_value_heads=HEADS,
    qk_rope_head_dim=0,
    index_kpool=4,
    linear_head_dim=16,
    linear_num_heads=4,
    mlp_layer_types=["dense", "sparse"],
)
_family("glm_moe_dsa", "GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", num_key_value_heads=HEADS)
_family("gpt_oss", "GptOssConfig", "GptOssForCausalLM")
_family("granitemoe", "GraniteMoeConfig", "GraniteMoeForCausalLM")
_family("granitemoe_swa", "GraniteMoeSWAConfig", "GraniteMoeSWAForCausalLM")
_family("granitemoehybrid", "GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM")
_family("granitemoeshared", "GraniteMoeSharedConfig", "GraniteMoeSharedForCausalLM")
_family("hunyuan_v1_moe", "HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM")
_family("hy_v3", "HYV3Config", "HYV3ForCausalLM")
_family("hy_v4", "HYV4Config", "HYV4ForCausalLM")
_family(
    "hy_v4_vl_text",
    "HYV4VLTextConfig",
    "HYV4VLTextModel",
    folder="hy_v4_vl",
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
)
_family("inkling_text", "InklingTextConfig", "InklingForCausalLM", folder="inkling")
_family("inkling2_text", "Inkling2TextConfig", "Inkling2ForCausalLM", folder="inkling2", unpadded_vocab_size=VOCABULARY)
_family(
    "inkling2_loop_text",
    "Inkling2LoopTextConfig",
    "Inkling2LoopForCausalLM",
    folder="inkling2_loop",
    unpadded_vocab_size=VOCABULARY,
)
_family("jamba", "JambaConfig", "JambaForCausalLM")
_family("kimi_linear", "KimiLinearConfig", "KimiLinearForCausalLM")
_family("kolibri1", "Kolibri1Config", "Kolibri1ForCausalLM")
_family("laguna", "LagunaConfig", "LagunaForCausalLM")
_family("lara_mini", "LaraMiniConfig", "LaraMiniForCausalLM")
_family("lfm2_moe", "Lfm2MoeConfig", "Lfm2MoeForCausalLM", layer_types=["full_attention", "conv"], num_dense_layers=1)
_family("mellum", "MellumConfig", "MellumForCausalLM")
_family("mimo_v2_flash", "MiMoV2FlashConfig", "MiMoV2FlashForCausalLM")
_family("minimax", "MiniMaxConfig", "MiniMaxForCausalLM")
_family("minimax_m2", "MiniMaxM2Config", "MiniMaxM2ForCausalLM")
_family("minimax_m3_vl_text", "MiniMaxM3VLTextConfig", "MiniMaxM3VLForCausalLM", folder="minimax_m3_vl")
_family("mistral4", "Mistral4Config", "Mistral4ForCausalLM", num_key_value_heads=HEADS)
_family(
    "mistral_large4_text",
    "MistralLarge4TextConfig",
    "MistralLarge4TextModel",
    folder="mistral_large4",
    num_key_value_heads=HEADS,
)
_family("mixtral", "MixtralConfig", "MixtralForCausalLM")
_family("muse_spark_text", "MuseSparkTextConfig", "MuseSparkTextModel", folder="muse_spark")
_family("nemotron_h", "NemotronHConfig", "NemotronHForCausalLM")
_family("olmoe", "OlmoeConfig", "OlmoeForCausalLM")
_family("openai_privacy_filter", "OpenAIPrivacyFilterConfig", "OpenAIPrivacyFilterModel")
_family("phimoe", "PhimoeConfig", "PhimoeForCausalLM")
_family("qwen2_moe", "Qwen2MoeConfig", "Qwen2MoeForCausalLM")
_family("qwen3_5_moe_text", "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", folder="qwen3_5_moe")
_family("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM")
_family("qwen3_next", "Qwen3NextConfig", "Qwen3NextForCausalLM")
_family("qwen3_omni_thinker_text", "Qwen3OmniMoeTextConfig", "Qwen3OmniMoeThinkerTextModel", folder="qwen3_omni_moe")
_family(
    "qwen3_omni_talker_text",
    "Qwen3OmniMoeTalkerTextConfig",
    "Qwen3OmniMoeTalkerModel",
    folder="qwen3_omni_moe",
    shared_expert_intermediate_size=MOE_FFN,
)
_family("qwen3_vl_moe_text", "Qwen3VLMoeTextConfig", "Qwen3VLMoeTextModel", folder="qwen3_vl_moe")
_family("qwen4_exp_text", "Qwen4ExpTextConfig", "Qwen4ExpForCausalLM", folder="qwen4_exp")
_family("sarvam_moe", "SarvamMoEConfig", "Glm4MoeForCausalLM", folder="glm4_moe")
_family("sarvam_mla", "SarvamMLAConfig", "DeepseekV3ForCausalLM", folder="deepseek_v3", num_key_value_heads=HEADS)
_family("solar_open", "SolarOpenConfig", "SolarOpenForCausalLM")
_family(
    "unlimited_ocr_text",
    "UnlimitedOcrTextConfig",
    "UnlimitedOcrTextModel",
    folder="unlimited_ocr",
    num_key_value_heads=HEADS,  # its eager attention fails on fewer
)
_family("zaya", "ZayaConfig", "ZayaForCausalLM", num_experts_per_tok=1, router_hidden_size=16)


def _resolve(folder: str, name: str) -> Any:
    for part in ("modeling", "configuration"):
        try:
            module = importlib.import_module(f"transformers.models.{folder}.{part}_{folder}")
        except ImportError:
            continue
        if hasattr(module, name):
            return getattr(module, name)
    return getattr(transformers, name)


def available(name: str) -> bool:
    """Whether the installed Transformers has this family."""
    family = FAMILIES[name]
    try:
        _resolve(family.folder, family.config), _resolve(family.folder, family.model)
    except AttributeError:
        return False
    return True


def families() -> list[str]:
    """The families that the installed Transformers has."""
    return [name for name in FAMILIES if available(name)]


def _fields(config_class: type) -> set[str]:
    names: set[str] = set(getattr(config_class, "attribute_map", {}))
    for cls in config_class.__mro__:
        if cls.__name__ in ("PreTrainedConfig", "PretrainedConfig"):
            break
        names |= set(getattr(cls, "__annotations__", {}))
        if "__init__" in vars(cls):
            names |= set(inspect.signature(vars(cls)["__init__"]).parameters)
    return names


def config(name: str, **extra: Any) -> Any:
    """The tiny config of a family."""
    family = FAMILIES[name]
    config_class = _resolve(family.folder, family.config)
    fields = _fields(config_class)
    aliases = getattr(config_class, "attribute_map", {})
    values = {field: value for field, value in GENERIC.items() if field in fields}
    # an alias and the field it stands for would collide: the real field stays
    values = {field: value for field, value in values.items() if aliases.get(field) not in values}
    values = {aliases.get(field, field): value for field, value in values.items()}
    return config_class(**values | family.overrides | extra)


def build(
    name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, config_object: Any = None, **extra: Any
) -> Any:
    """A tiny model of a family in eval mode, from `config_object` where one is given."""
    model_class = _resolve(FAMILIES[name].folder, FAMILIES[name].model)
    torch.manual_seed(seed)
    model = model_class._from_config(config_object if config_object is not None else config(name, **extra), dtype=dtype)
    model.eval()
    randomise(model, seed)
    return model


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0, std: float = 0.1) -> None:
    """Weights that no family's own initialisation degenerates: some set routers, biases or experts to zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 or name.endswith("bias"):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):  # zero until a checkpoint fills it: every token would go to one expert, K times
            scores = torch.rand(table.shape[0], EXPERTS, generator=generator)
            table.copy_(scores.topk(table.shape[1]).indices)


def experts_modules(model: nn.Module) -> list[nn.Module]:
    """The decorated experts modules, found without the package under test."""
    return [m for m in model.modules() if hasattr(m, "is_transposed") and hasattr(m, "has_gate")]


def sample_inputs(model: Any, batch: int = 2, length: int = 12, seed: int = 0) -> dict[str, Tensor]:
    """Random token ids; embeddings for the one model whose forward does not find its embedding."""
    generator = torch.Generator().manual_seed(seed)
    text_config = model.config.get_text_config()
    vocabulary = min(getattr(text_config, "vocab_size", None) or VOCABULARY, VOCABULARY)
    ids = torch.randint(3, vocabulary, (batch, length), generator=generator)
    if type(model).__name__ == "Qwen3OmniMoeTalkerModel":
        embedding = model.get_input_embeddings()
        return {"inputs_embeds": embedding(ids.to(embedding.weight.device)).detach()}
    return {"input_ids": ids}


def output(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Logits, or the last hidden state of a model without a head."""
    out = model(**inputs)
    for name in ("logits", "last_hidden_state"):
        found: Tensor | None = getattr(out, name, None)
        if found is not None:
            return found
    first: Tensor = out[0]
    return first
