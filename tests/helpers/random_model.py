"""Models with random weights in the shapes of well-known ones: as fast as those, and nothing to download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

WINDOW = 40_960  # tokens: a prompt of 32K, and what stands around it
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"vocab_size": 128_256, "rope_theta": 500_000.0}),
    "mistral": ("MistralConfig", {"vocab_size": 32_768, "rope_theta": 1_000_000.0, "sliding_window": None}),
}
"""Llama-3-8B and Mistral-7B-v0.3, but for the window, and a vocabulary that the tokenizer fits into."""

_BOTH = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": WINDOW,
}


def config_of(shape: str, tokenizer: Any, **smaller: Any) -> Any:
    """The configuration of a shape. smaller: other numbers, for tests."""
    import transformers

    kind, options = SHAPES[shape]
    options = _BOTH | options | smaller
    rope = {"rope_type": "default", "rope_theta": options.pop("rope_theta")}
    options["vocab_size"] = max(options["vocab_size"], len(tokenizer))
    return getattr(transformers, kind)(rope_parameters=rope, dtype="bfloat16", **options)


def random_model(shape: str, tokenizer: Any, folder: Path, device: str, **smaller: Any) -> Path:
    """Made in ``folder``, which is returned: bfloat16 weights, drawn on ``device``."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of(shape, tokenizer, **smaller), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
