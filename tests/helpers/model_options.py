"""Options of small models that several of ``model_shapes`` share."""

from __future__ import annotations

WINDOWS = {"sliding_window": 64}
MOSTLY_WINDOWS = ["sliding_attention"] * 3 + ["full_attention"]
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LINEAR = {
    "shared_expert_intermediate_size": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
MOSTLY_LINEAR = ["linear_attention"] * 3 + ["full_attention"]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
LLAMA4 = {"intermediate_size_mlp": 256, "interleave_moe_layer_step": 0, "moe_layers": []}
ROPE = {"rope_type": "default", "rope_theta": 1e6}
YARN = {
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
VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "patch_size": 14,
}
PIXTRAL = {**VISION, "image_size": 56, "head_dim": 16}
CLIP = {**VISION, "image_size": 56, "model_type": "clip_vision_model"}
SIGLIP = {**CLIP, "model_type": "siglip_vision_model"}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "out_hidden_size": 128,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
}
SIGNS = {"vision_start_token_id": 5, "vision_end_token_id": 6, "image_token_id": 7, "video_token_id": 8}
LLAMA4_VISION = {
    **VISION,
    "image_size": 56,
    "projector_input_dim": 64,
    "projector_output_dim": 64,
    "vision_output_dim": 64,
}
DYNAMIC_ROPE = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
HUNYUAN_ROPE = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 10000.0}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 12,
    "long_factor": [2.0] * 12,
    "original_max_position_embeddings": 512,  # fewer than the engine's window
    "partial_rotary_factor": 0.75,
}
# Of more experts than it uses, random ones are chosen otherwise where K is rounded otherwise.
GRANITE_MOE = {"num_local_experts": 2, "num_experts_per_tok": 2, "residual_multiplier": 0.3}
GEMMA = {**WINDOWS, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}
COHERE = {
    "sliding_window_pattern": 4,
    "sliding_window": 256,
    "logit_scale": 1.0,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
}
GLM_ROPE = {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}
GLM_SIGNS = {"image_token_id": 7, "video_token_id": 8, "image_start_token_id": 5, "image_end_token_id": 6}
GEMMA4 = {
    **WINDOWS,
    "layer_types": MOSTLY_WINDOWS,
    "global_head_dim": 64,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
GEMMA4_SHARED_KEYS = {
    **GEMMA4,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "use_bidirectional_attention": "vision",
}
GEMMA4_READER = "Gemma4Config", {"vision_config": {**VISION, "head_dim": 16, "num_key_value_heads": 4}}
GEMMA4_AUDIO = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "output_proj_dims": 64}
LATENT = {
    # Sizes that vLLM's CPU build computes; its RoPE of other types is wrong for them.
    "q_lora_rank": None,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 64,
    "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16}
LFM = {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "conv_dim": 128, "block_dim": 128}
NO_ATTENTION = "it has no single attention module"
