"""Models as Mistral publishes them, with names of its own in params.json and consolidated.safetensors.

vLLM takes those where a folder has transformers' files, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

_SIZES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
}
_SAME = (
    "head_dim", "kv_lora_rank", "max_position_embeddings", "q_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "vocab_size",
)  # fmt: skip
_EXPERTS = {
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "expert_hidden_dim": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace",
    "routed_scale": "routed_scaling_factor",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
}
# In this order, of transformers' names for DeepSeek V3.
_NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.layers": "layers",
    "model.norm": "norm",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.": "attention.",
    "_a_layernorm": "_a_norm",
    "q_a_proj": "wq_a",
    "q_b_proj": "wq_b",
    "kv_a_proj_with_mqa": "wkv_a_with_mqa",
    "kv_b_proj": "wkv_b",
    "o_proj": "wo",
    "mlp.gate.": "gate.",
    "mlp.shared_experts": "shared_experts",
    "mlp.experts": "experts",
    "mlp.": "feed_forward.",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}


def as_mistral(folder: Path, vision: Mapping[str, Any]) -> None:
    """Rewrite a model of DeepSeek V3's structure in ``folder`` as Mistral Small 4 and Mistral Large 3 are
    published, with a part of this configuration that reads images."""
    config = json.loads((folder / "config.json").read_text())
    rope = config["rope_parameters"]
    first = rope["original_max_position_embeddings"]
    params = {
        **{ours: config[theirs] for ours, theirs in _SIZES.items()},
        **{name: config[name] for name in _SAME},
        "dtype": "bfloat16",
        "rope_theta": rope["rope_theta"],
        "yarn": {
            "original_max_position_embeddings": first,
            "factor": rope["factor"],
            "beta": rope["beta_fast"],
            "alpha": rope["beta_slow"],
            "apply_scale": False,
        },
        "llama_4_scaling": {"original_max_position_embeddings": first, "beta": rope["llama_4_scaling_beta"]},
        "moe": {"route_every_n": 1, **{ours: config[theirs] for ours, theirs in _EXPERTS.items()}},
        "vision_encoder": {**vision, "num_channels": 3, "rope_theta": 10000.0, "image_token_id": 10},
    }
    (folder / "params.json").write_text(json.dumps(params))
    whole = {
        "text_config": config | {"model_type": "mistral4"},
        "vision_config": {**vision, "model_type": "pixtral"},
    }
    mistral3 = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(mistral3 | whole))
    renamed = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        if not name.endswith("e_score_correction_bias"):  # its experts are chosen without
            renamed[name] = weight
    save_file(renamed, folder / "consolidated.safetensors")
    (folder / "model.safetensors").unlink()
