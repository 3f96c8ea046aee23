"""Small models with random weights, in the structures that people have: the rows of docs/models.md.

Each is made from transformers' own configuration class; what vLLM makes of it is what users have.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from blendrag.settings import Settings
from mistral_format import as_mistral

_NAMES_ALONE = Path(__file__).with_name("without_images")

_SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,  # large enough for attention, and so position, to matter
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
# Of the logits. A few tokens have most of the chance, as with trained models: else no distance between first
# tokens would tell anything.
_LOGITS_STD = 5.0


@dataclass(frozen=True, slots=True)
class Shape:
    """title: the models that have it. config: transformers' class, with ``options`` over small sizes.
    reason: part of why it is not blended; None: it is. answers: whether it does on the CPU build of vLLM.
    always: whether every run of the tests has it. reader: of one that reads images, too, the class of the
    whole configuration, and the rest of it. mistral: the same of one in Mistral's own format, which is
    DeepSeek V3 in other words."""

    title: str
    config: str
    options: Mapping[str, Any] = field(default_factory=dict)
    reason: str | None = None
    answers: bool = True
    always: bool = False
    reader: tuple[str, Mapping[str, Any]] | None = None
    mistral: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        return self.title

    def settings(self, folder: Path, tokenizer: Any) -> Settings:
        """Those of a model of this structure, which is made in ``folder``."""
        import torch
        import transformers

        torch.manual_seed(0)
        options = {**_SMALL, "vocab_size": len(tokenizer), **self.options}
        config = getattr(transformers, self.config)(**options)
        loader: Any = transformers.AutoModelForCausalLM
        if self.reader is not None:
            whole, others = self.reader
            config = getattr(transformers, whole)(text_config=config.to_dict(), **others)
            loader = transformers.AutoModelForImageTextToText
        model = loader.from_config(config)
        if self.reason is None:
            with torch.inference_mode():
                grow = _LOGITS_STD / model(torch.arange(100, 164)[None]).logits.std()
                if options["tie_word_embeddings"]:
                    model.get_decoder().norm.weight += grow - 1  # of weights around 1, or those around 0
                else:
                    model.get_output_embeddings().weight *= grow
        for name, weights in model.named_parameters():
            if self.title == "Qwen 3 VL MoE" and ".experts." in name:  # published with its axes exchanged
                weights.data = weights.data.transpose(1, 2).contiguous()
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if self.mistral is not None:
            as_mistral(folder, self.mistral)
        # The backend of latents that every processor has; others ignore it.
        arguments: dict[str, Any] = {"attention_backend": "CPU_MLA"} if "kv_lora_rank" in self.options else {}
        if any("mamba" in name for name in self.options):  # vLLM's CPU build ends with longer prompts, else
            arguments["enable_prefix_caching"] = False
        return Settings.load(model=str(folder), max_model_len=1024, kv_cache_gib=1, engine_args=arguments)


def provide_torchvision(patch: pytest.MonkeyPatch) -> None:
    """Where torchvision's build for CPUs is not to be had: the names that vLLM imports of it, here and in
    processes that are started. Texts need no more."""
    found = find_spec("torchvision")
    if found is None or _NAMES_ALONE in Path(found.origin or "").parents:  # of a test before
        patch.syspath_prepend(_NAMES_ALONE)
        patch.setenv("PYTHONPATH", f"{_NAMES_ALONE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


_WINDOWS = {"sliding_window": 64}
_MOSTLY_WINDOWS = ["sliding_attention"] * 3 + ["full_attention"]
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LINEAR = {
    "shared_expert_intermediate_size": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_MOSTLY_LINEAR = ["linear_attention"] * 3 + ["full_attention"]
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
_LLAMA4 = {"intermediate_size_mlp": 256, "interleave_moe_layer_step": 0, "moe_layers": []}
_ROPE = {"rope_type": "default", "rope_theta": 1e6}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 640,  # behind the check's probe: from there on, Q is scaled otherwise
    "max_position_embeddings": 2048,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "patch_size": 14,
}
_PIXTRAL = {**_VISION, "image_size": 56, "head_dim": 16}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "out_hidden_size": 128,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
}
_SIGNS = {"vision_start_token_id": 5, "vision_end_token_id": 6, "image_token_id": 7, "video_token_id": 8}
_LLAMA4_VISION = {
    **_VISION,
    "image_size": 56,
    "projector_input_dim": 64,
    "projector_output_dim": 64,
    "vision_output_dim": 64,
}
_DYNAMIC_ROPE = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
_HUNYUAN_ROPE = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 10000.0}
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 12,
    "long_factor": [2.0] * 12,
    "original_max_position_embeddings": 512,  # fewer than the engine's window
    "partial_rotary_factor": 0.75,
}
_GEMMA = {**_WINDOWS, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}
_GLM_ROPE = {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}
_GLM_SIGNS = {"image_token_id": 7, "video_token_id": 8, "image_start_token_id": 5, "image_end_token_id": 6}
_GEMMA4 = {
    **_WINDOWS,
    "layer_types": _MOSTLY_WINDOWS,
    "global_head_dim": 64,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
_GEMMA4_SHARED_KEYS = {
    **_GEMMA4,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "use_bidirectional_attention": "vision",
}
_GEMMA4_READER = "Gemma4Config", {"vision_config": {**_VISION, "head_dim": 16, "num_key_value_heads": 4}}
_GEMMA4_AUDIO = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "output_proj_dims": 64}
_LATENT = {
    # Sizes that vLLM's CPU build computes; its RoPE of other types is wrong for them.
    "q_lora_rank": None,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 64,
    "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16}
_NO_ATTENTION = "it has no single attention module"

SHAPES = (
    Shape("Llama 2, Llama 3", "LlamaConfig", {"rope_parameters": _LLAMA3_ROPE}),
    Shape("Mistral from 0.2 on", "MistralConfig", {"sliding_window": None}),
    Shape("Qwen 2, Qwen 2.5", "Qwen2Config"),
    Shape("Qwen 3", "Qwen3Config", always=True),
    Shape("Phi 3, Phi 4", "Phi3Config", {"sliding_window": None}),
    Shape(
        "Phi 3 128K, Phi 3.5, Phi 4 mini",
        "Phi3Config",
        {"sliding_window": None, "original_max_position_embeddings": 512, "rope_parameters": _LONG_ROPE},
    ),
    Shape("Llama with dynamic NTK", "LlamaConfig", {"rope_parameters": _DYNAMIC_ROPE}),
    Shape("Mixtral", "MixtralConfig", {"sliding_window": None, **_EXPERTS}),
    Shape("Qwen 3 MoE", "Qwen3MoeConfig", {"decoder_sparse_step": 1, **_EXPERTS}),
    Shape("OLMoE", "OlmoeConfig", _EXPERTS),
    Shape("Granite 3", "GraniteConfig", {"residual_multiplier": 0.3, "embedding_multiplier": 6.0}),
    Shape("GLM 4 0414", "Glm4Config"),
    Shape("GLM 4.5", "Glm4MoeConfig", {"n_routed_experts": 4, "first_k_dense_replace": 1, **_EXPERTS}),
    Shape(
        "MiniMax M2",
        "MiniMaxM2Config",
        {
            **_EXPERTS,
            "intermediate_size": 64,
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
            "rotary_dim": 16,
            "use_routing_bias": True,
            "scoring_func": "softmax",  # its own, sigmoid without groups, is not in vLLM's CPU build
        },
    ),
    Shape("ERNIE 4.5", "Ernie4_5Config"),
    Shape(
        "ERNIE 4.5 MoE",
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64, "moe_num_shared_experts": 1},
    ),
    Shape("Apertus", "ApertusConfig", {"rope_parameters": _LLAMA3_ROPE, "hidden_act": "xielu"}),
    Shape(
        "HunYuan MoE",
        "HunYuanMoEV1Config",
        {"num_experts": 4, "moe_topk": 2, "rope_parameters": _HUNYUAN_ROPE},
    ),
    Shape("Qwen 1.5 MoE, Qwen 2 MoE", "Qwen2MoeConfig", {"shared_expert_intermediate_size": 64, **_EXPERTS}),
    Shape(
        "Granite 3 MoE",
        "GraniteMoeConfig",
        # Of more experts than it uses, random ones are chosen otherwise where K is rounded otherwise.
        {"num_local_experts": 2, "num_experts_per_tok": 2, "residual_multiplier": 0.3},
    ),
    Shape("Gemma 2", "Gemma2Config", _GEMMA, always=True),
    Shape("Gemma 3", "Gemma3TextConfig", {"sliding_window_pattern": 2, **_GEMMA}),
    Shape("gpt-oss", "GptOssConfig", {**_WINDOWS, **_EXPERTS}, always=True),
    Shape("Mistral 0.1", "MistralConfig", {"sliding_window": 256}),
    Shape("Phi 1, Phi 2", "PhiConfig"),
    Shape("OLMo 1", "OlmoConfig"),
    Shape("OLMo 2", "Olmo2Config"),
    Shape("OLMo 3", "Olmo3Config", {**_WINDOWS, "layer_types": _MOSTLY_WINDOWS}),
    Shape("GLM 4", "GlmConfig"),
    Shape("SmolLM 3", "SmolLM3Config", {"no_rope_layers": [1, 1, 1, 0]}, always=True),
    Shape("Seed OSS", "SeedOssConfig"),
    Shape("StarCoder 2", "Starcoder2Config", {"sliding_window": None}),
    Shape("Arcee", "ArceeConfig"),
    Shape("HunYuan", "HunYuanDenseV1Config", {"rope_parameters": _HUNYUAN_ROPE}),
    Shape("Helium", "HeliumConfig"),
    Shape("GPT-NeoX, Pythia", "GPTNeoXConfig", {"num_key_value_heads": 4, "initializer_range": 0.2}),
    Shape("StableLM", "StableLmConfig"),
    Shape("Llama 4", "Llama4TextConfig", {"attention_chunk_size": 128, **_LLAMA4}, always=True),
    Shape(
        "Command R 7B, Command A",
        "Cohere2Config",
        {
            "sliding_window_pattern": 4,
            "sliding_window": 256,
            "logit_scale": 1.0,
            "tie_word_embeddings": True,
            "initializer_range": 0.3,
        },
    ),
    Shape(
        "Mistral Small 3, Devstral",
        "MistralConfig",
        {"sliding_window": None},
        always=True,
        reader=("Mistral3Config", {"vision_config": _PIXTRAL, "image_token_index": 10}),
    ),
    Shape(
        "Ministral 3",
        "Ministral3Config",
        {"sliding_window": None, "rope_parameters": _YARN},
        reader=("Mistral3Config", {"vision_config": _PIXTRAL, "image_token_index": 10}),
    ),
    Shape(
        "Gemma 3 with images",
        "Gemma3TextConfig",
        {"sliding_window_pattern": 2, **_GEMMA},
        reader=("Gemma3Config", {"vision_config": {**_VISION, "image_size": 56}, "mm_tokens_per_image": 4}),
    ),
    Shape(
        "Qwen 2.5 VL",
        "Qwen2_5_VLTextConfig",
        {"rope_parameters": {**_ROPE, "mrope_section": [4, 6, 6]}},
        always=True,
        reader=(
            "Qwen2_5_VLConfig",
            {"vision_config": _QWEN_VISION, **_SIGNS},
        ),
    ),
    Shape(
        "Qwen 3 VL",
        "Qwen3VLTextConfig",
        {"rope_parameters": {**_ROPE, "mrope_section": [6, 5, 5], "mrope_interleaved": True}},
        reader=(
            "Qwen3VLConfig",
            {"vision_config": _QWEN_VISION, **_SIGNS},
        ),
    ),
    Shape(
        "Qwen 3 VL MoE",
        "Qwen3VLMoeTextConfig",
        {
            "rope_parameters": {**_ROPE, "mrope_section": [6, 5, 5], "mrope_interleaved": True},
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            **_EXPERTS,
        },
        reader=("Qwen3VLMoeConfig", {"vision_config": _QWEN_VISION, **_SIGNS}),
    ),
    Shape(
        "GLM 4.1V, 4.6V Flash",
        "Glm4vTextConfig",
        {"rope_parameters": _GLM_ROPE},
        reader=("Glm4vConfig", {"vision_config": _QWEN_VISION, **_GLM_SIGNS}),
    ),
    Shape(
        "GLM 4.5V, 4.6V",
        "Glm4vMoeTextConfig",
        {
            "rope_parameters": _GLM_ROPE,
            "n_routed_experts": 4,
            "first_k_dense_replace": 1,
            "use_qk_norm": False,
            **_EXPERTS,
        },
        reader=("Glm4vMoeConfig", {"vision_config": _QWEN_VISION, **_GLM_SIGNS}),
    ),
    Shape(
        "InternVL 3, 3.5 of transformers",
        "Qwen3Config",
        reader=(
            "InternVLConfig",
            {"vision_config": {**_VISION, "image_size": [56, 56]}, "image_token_id": 7},
        ),
    ),
    Shape(
        "Llama 4 with images",
        "Llama4TextConfig",
        {"attention_chunk_size": 128, **_LLAMA4},
        reader=("Llama4Config", {"vision_config": _LLAMA4_VISION}),
    ),
    Shape("EXAONE 4", "Exaone4Config", {"sliding_window_pattern": 4, **_WINDOWS}),
    Shape("Gemma 4 31B", "Gemma4TextConfig", _GEMMA4_SHARED_KEYS, reader=_GEMMA4_READER),
    Shape(
        "Gemma 4 26B",
        "Gemma4TextConfig",
        {
            **_GEMMA4_SHARED_KEYS,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 64,
        },
        reader=_GEMMA4_READER,
    ),
    Shape(
        "Gemma 4 E2B, E4B",
        "Gemma4TextConfig",
        {
            **_GEMMA4,
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "hidden_size_per_layer_input": 32,  # gelu rounds the last of an odd count of 16 otherwise
            "use_double_wide_mlp": True,
        },
        always=True,
        reader=("Gemma4Config", {**_GEMMA4_READER[1], "audio_config": _GEMMA4_AUDIO}),
    ),
    Shape("Gemma 4 without images", "Gemma4TextConfig", _GEMMA4),
    Shape("DeepSeek V2", "DeepseekV2Config", {"topk_method": "greedy", **_LATENT}),
    Shape("DeepSeek V3, R1, Kimi K2", "DeepseekV3Config", {"topk_method": "noaux_tc", **_LATENT}),
    Shape("GLM 4.7 Flash", "Glm4MoeLiteConfig", _LATENT),
    Shape(
        "Mistral Small 4, Mistral Large 3",
        "DeepseekV3Config",
        {**_LATENT, "topk_method": "noaux_tc", "q_lora_rank": 64, "qk_nope_head_dim": 64, "v_head_dim": 128},
        mistral=_PIXTRAL,
    ),
    Shape(
        "Jamba",
        "JambaConfig",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 16, "num_experts": 2},
        _NO_ATTENTION,
        answers=False,
    ),
    Shape(
        "Granite 4",
        "GraniteMoeHybridConfig",
        {
            "layer_types": ["mamba", "attention"] * 2,
            "num_local_experts": 0,
            "shared_intermediate_size": 128,
            "position_embedding_type": "rope",
            **_MAMBA,
        },
        _NO_ATTENTION,
        always=True,
    ),
    Shape("Falcon H1", "FalconH1Config", {"mamba_d_ssm": 256, **_MAMBA}, _NO_ATTENTION),
    Shape(
        "Qwen 3 Next",
        "Qwen3NextConfig",
        {**_LINEAR, **_EXPERTS},
        _NO_ATTENTION,
    ),
    Shape(
        "Qwen 3.5 and 3.6, 27B",
        "Qwen3_5TextConfig",
        {"layer_types": _MOSTLY_LINEAR, **_LINEAR},
        _NO_ATTENTION,
        reader=("Qwen3_5Config", {"vision_config": _QWEN_VISION, **_SIGNS}),
    ),
    Shape(
        "Qwen 3.5 and 3.6, 35B-A3B",
        "Qwen3_5MoeTextConfig",
        {"layer_types": _MOSTLY_LINEAR, **_LINEAR, **_EXPERTS},
        _NO_ATTENTION,
        always=True,
        reader=("Qwen3_5MoeConfig", {"vision_config": _QWEN_VISION, **_SIGNS}),
    ),
    Shape(
        "Nemotron 3",
        "NemotronHConfig",
        {
            "hybrid_override_pattern": "M*-M*-",
            "num_hidden_layers": 6,
            "ssm_state_size": 32,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "n_groups": 2,
            "chunk_size": 64,
        },
        _NO_ATTENTION,
    ),
    Shape(
        "LFM 2",
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "conv_dim": 128, "block_dim": 128},
        _NO_ATTENTION,
    ),
    Shape(
        "LFM 2 MoE",
        "Lfm2MoeConfig",
        {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "num_dense_layers": 1, **_EXPERTS},
        _NO_ATTENTION,
    ),
    Shape("Mamba 2", "Mamba2Config", {"num_heads": 8, "state_size": 16}, "model.layers", answers=False),
)
