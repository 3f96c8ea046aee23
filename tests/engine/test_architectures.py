"""Blending with other structures than the default model's: small models with random weights, real engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blendrag.lab.doctor import run_doctor
from blendrag.settings import Settings

pytestmark = [pytest.mark.own_engine, pytest.mark.slow]

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.08,  # large enough for attention, and so position, to matter
}


@pytest.fixture
def small_model(tmp_path: Path, tokenizer: Any) -> Callable[..., Settings]:
    """Make a model of a given configuration class and its settings."""

    def make(config_name: str, **options: Any) -> Settings:
        import torch
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, config_name)(vocab_size=len(tokenizer), **(SMALL | options))
        folder = tmp_path / config_name
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return Settings.load(model=str(folder), max_model_len=2048, kv_cache_gib=1)

    return make


@pytest.mark.parametrize(
    ("config_name", "options"),
    [
        ("Qwen3Config", {"head_dim": 64}),  # piecewise, with norms of Q and K
        ("MistralConfig", {"sliding_window": None}),
        ("GraniteConfig", {"residual_multiplier": 0.3, "embedding_multiplier": 6.0}),  # whole layers
        ("Gemma2Config", {"head_dim": 64, "query_pre_attn_scalar": 64}),  # windows, caps, four norms
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_no_structure_blends_to_something_else_than_full_prefill(
    small_model: Callable[..., Settings], config_name: str, options: dict[str, Any]
) -> None:
    report = run_doctor(small_model(config_name, **options))
    assert report.passed, [row for row in report.rows if not row.ok]


@pytest.mark.parametrize(
    ("config_name", "options", "reason"),
    [
        (
            "LlamaConfig",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}},
            "DynamicNTKScalingRotaryEmbedding",
        ),
        ("MistralConfig", {"sliding_window": 64}, "all of its layers have windows"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_structure_whose_kv_cannot_be_moved_or_is_given_up_is_blended(
    small_model: Callable[..., Settings], config_name: str, options: dict[str, Any], reason: str
) -> None:
    report = run_doctor(small_model(config_name, **options))
    assert not report.passed
    assert reason in (report.unsupported or "")
