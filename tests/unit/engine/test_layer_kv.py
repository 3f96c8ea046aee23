"""In which shape the KV of layers is stored, where they are not all alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from blendrag.engine.compat.layer_kv import LatentKV, LayerKV, stored_shape
from blendrag.serving.identity import kv_identity
from blendrag.settings import Settings
from blendrag.store.codec import make_codec
from blendrag.store.identity import HeadShape, kv_shape
from places import DOCS

LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
GEMMA = {"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256, "attention_k_eq_v": True}
DEEPSEEK = {"num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


def of_heads(shape: HeadShape) -> LayerKV:
    return LayerKV(SimpleNamespace(num_kv_heads=shape[0], head_size=shape[1]))


def of_latents(rank: int, turned: int) -> LatentKV:
    return LatentKV(SimpleNamespace(num_kv_heads=1, head_size=rank + turned, kv_lora_rank=rank))


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=4))
def test_layers_with_other_heads_are_stored_in_one_shape_and_come_back(
    fewest: int, others: list[tuple[int, int]]
) -> None:
    layers = [of_heads((fewest, 5)), *(of_heads((fewest * times, size)) for times, size in others)]
    shape = stored_shape(layers)
    assert shape is not None and shape[0] == fewest
    for layer in layers:
        key, value = torch.randn(2, 3, *layer.key)
        stored = layer.stored(shape, key, value)
        assert all(part.shape == (3, *shape) for part in stored)
        back = layer.loaded(*stored)
        assert back[0].equal(key) and back[1].equal(value)


@given(st.integers(1, 9), st.integers(1, 9))
def test_latents_are_stored_once_and_come_back_as_key_and_value(rank: int, turned: int) -> None:
    layer = of_latents(rank, turned)
    shape = stored_shape([layer, layer])
    assert shape is not None and 2 * shape[1] - (rank + turned) in (0, 1)
    key = torch.randn(4, 1, rank + turned)
    stored = layer.stored(shape, key, key[..., :rank])
    assert all(part.shape == (4, *shape) for part in stored)
    back = layer.loaded(*stored)
    assert back[0].equal(key) and back[1].equal(key[..., :rank])


def test_layers_without_a_common_shape_have_none() -> None:
    assert stored_shape([of_heads((2, 8)), of_heads((3, 8))]) is None
    assert stored_shape([of_heads((1, 24)), of_latents(16, 8)]) is None
    assert stored_shape([of_latents(16, 8), of_latents(16, 4)]) is None


def of_config(heads: int, size: int, **others: Any) -> dict[str, Any]:
    return {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": size, **others}


# Layers, and what their shape follows from, as published.
PUBLISHED = {
    "SmolLM2 135M": (30, of_config(3, 64)),
    "Qwen 3 0.6B": (28, of_config(8, 128)),
    "Llama 3.1 8B": (32, of_config(8, 128)),
    "Qwen 3 30B-A3B": (48, of_config(4, 128)),
    "gpt-oss 20B": (24, of_config(8, 64)),
    "Mistral Small 3 24B": (40, of_config(8, 128)),
    "Gemma 3 27B": (62, of_config(16, 128)),
    "Gemma 4 31B": (
        60,
        of_config(16, 256, global_head_dim=512, num_global_key_value_heads=4, attention_k_eq_v=True),
    ),
    "Gemma 4 E2B": (35 - 20, of_config(1, 256, global_head_dim=512)),
    "Gemma 4 E4B": (42 - 18, of_config(2, 256, global_head_dim=512)),
    "GLM 4.7 Flash": (47, DEEPSEEK),
    "DeepSeek V3, R1, Kimi K2": (61, DEEPSEEK),
}


def test_page_says_what_a_token_costs() -> None:
    lines = ["| model | raw | fp8 | int8 | int4 |", "|---|---|---|---|---|"]
    for model, (layers, config) in PUBLISHED.items():
        heads, size = kv_shape(config) or (0, 0)
        codecs = (make_codec(name, heads, size, torch.bfloat16) for name in ("raw", "fp8", "int8", "int4"))
        costs = (f"{layers * codec.row_bytes(512) / 512 / 1000:,.0f}" for codec in codecs)
        lines.append(f"| {model} | {' | '.join(costs)} |")
    table = "\n".join(lines)
    assert table in (DOCS / "models.md").read_text(encoding="utf-8"), f"docs/models.md should have\n{table}"


@pytest.mark.parametrize(
    ("config", "layers", "shape"),
    [
        (LLAMA, [of_heads((8, 128))], (8, 128)),
        (
            {**GEMMA, "global_head_dim": 512, "num_global_key_value_heads": 4},
            [of_heads((16, 256)), of_heads((4, 512))],
            (4, 1024),
        ),
        (
            {**GEMMA, "per_layer_config": {"5": {"head_dim": 512, "num_key_value_heads": 4}}},
            [of_heads((16, 256)), of_heads((4, 512))],
            (4, 1024),
        ),
        (DEEPSEEK, [of_latents(512, 64)], (1, 288)),
    ],
)
def test_configuration_tells_the_shape_that_the_layers_have(
    config: Mapping[str, Any], layers: list[LayerKV], shape: HeadShape
) -> None:
    assert kv_shape(config) == stored_shape(layers) == shape


def test_layers_that_read_the_kv_of_others_are_not_stored(tmp_path: Path) -> None:
    of_text = {**GEMMA, "hidden_size": 1536, "num_hidden_layers": 35, "num_kv_shared_layers": 20}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma4", "text_config": of_text}))
    save_file({"weights": np.zeros(1)}, tmp_path / "model.safetensors")
    assert kv_identity(Settings.load(model=str(tmp_path)), tmp_path).num_layers == 15


def test_configuration_that_leaves_out_what_its_class_has_is_read_with_it(tmp_path: Path) -> None:
    of_text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}
    config = {"model_type": "gemma3", "text_config": of_text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"weights": np.zeros(1)}, tmp_path / "model.safetensors")
    identity = kv_identity(Settings.load(model=str(tmp_path)), tmp_path)
    assert (identity.num_layers, identity.num_kv_heads, identity.head_size) == (34, 4, 256)
