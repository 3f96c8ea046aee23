"""What is served without blending, by vLLM's own configuration and layers; no engine is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import ParallelConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.transformers import TransformersForCausalLM
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

from blendrag.engine.compat import unsupported
from blendrag.engine.compat.unsupported import unsupported_reason

HEADS, SIZE = 3, 64  # as in the config.json of the model that the configurations are made for
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LONG_ROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * (SIZE // 2),
    "long_factor": [2.0] * (SIZE // 2),
    "original_max_position_embeddings": 256,  # of a window of 512
}
FULL = FullAttentionSpec(block_size=128, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.float32)
WINDOW = SlidingWindowSpec(
    block_size=128, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.float32, sliding_window=64
)


def runner(spec: KVCacheSpec, block_size: int) -> Any:
    """With one group of layers, whose backend has blocks of this size."""
    builder = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=block_size))
    group = SimpleNamespace(kv_cache_spec=spec, get_metadata_builder=lambda: builder)
    return SimpleNamespace(attn_groups=[[group]])


def config(model_dir: Path, **options: Any) -> Any:
    return EngineArgs(str(model_dir), max_model_len=512, dtype="float32", **options).create_engine_config()


def reason(
    config: Any, *layers: Any, rope: dict[str, Any] = ROPE, spec: KVCacheSpec = FULL, block_size: int = 128
) -> str:
    """Of a model of these decoder layers, or one, whose KV vLLM keeps by ``spec``, and its backend in such
    blocks; "" if it is blended."""
    found = list(layers) or [attention_layer(config, rope)]
    model = SimpleNamespace(model=SimpleNamespace(layers=found))
    return unsupported_reason(config, runner(spec, block_size), model) or ""


def attention_layer(config: Any, rope: dict[str, Any] = ROPE, number: int = 0) -> Any:
    layer = torch.nn.Module()
    with set_current_vllm_config(config):
        layer.attn = Attention(
            HEADS,
            SIZE,
            0.1,
            num_kv_heads=HEADS,
            cache_config=config.cache_config,
            prefix=f"model.layers.{number}.attn",
        )
        layer.rotary = get_rope(SIZE, max_position=512, rope_parameters=rope)
    return layer


def test_plain_layer_is_blended(model_dir: Path) -> None:
    assert reason(config(model_dir)) == ""


def test_blocks_that_the_backend_splits_are_refused(model_dir: Path) -> None:
    assert "splits KV blocks" in reason(config(model_dir), block_size=16)


@pytest.mark.parametrize(
    "ranks",
    [
        {"pipeline_parallel_size": 2},
        {"data_parallel_size": 2},
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
        {"prefill_context_parallel_size": 2},
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    ],
    ids=lambda ranks: "-".join(ranks),
)
def test_rank_that_others_do_not_wait_for_is_refused(model_dir: Path, ranks: dict[str, Any]) -> None:
    made = config(model_dir)
    made.parallel_config = ParallelConfig(**ranks)
    assert "parallel" in reason(made)


def test_ranks_that_share_tensors_are_taken(model_dir: Path) -> None:
    made = config(model_dir)
    made.parallel_config = ParallelConfig(tensor_parallel_size=2)
    assert reason(made) == ""


@pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM keeps KV in eight bits on CPUs with AVX-512 only"
)
@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2"])
def test_cache_of_eight_bits_is_taken(model_dir: Path, dtype: Any) -> None:
    assert reason(config(model_dir, kv_cache_dtype=dtype)) == ""


def test_cache_with_a_scale_per_token_is_refused(model_dir: Path) -> None:
    made = config(model_dir)
    layer = attention_layer(made)
    layer.attn.kv_cache_dtype = "fp8_per_token_head"
    assert "is not known (kv_cache_dtype fp8_per_token_head)" in reason(made, layer)


@pytest.mark.parametrize(
    ("sharing", "by_config", "said"),
    [
        ((), 0, ""),
        ((1, 2), 2, ""),
        ((1, 2), 0, "2 of its layers read the KV of others, and by its config.json 0"),
        ((), 2, "0 of its layers read the KV of others, and by its config.json 2"),
        ((1,), 0, "layer 1: its attention is not plain"),
    ],
)
def test_layers_share_kv_where_only_the_last_ones_do_as_their_configuration_says(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, sharing: Sequence[int], by_config: int, said: str
) -> None:
    made = config(model_dir)
    text = made.model_config.hf_text_config
    monkeypatch.setattr(text, "num_kv_shared_layers", by_config, raising=False)
    layers = [attention_layer(made, number=number) for number in range(3)]
    for number in sharing:
        layers[number].attn.kv_sharing_target_layer_name = "model.layers.0.attn"
    found = reason(made, *layers)
    assert said in found and bool(said) == bool(found)


@pytest.mark.parametrize(
    ("rope", "refused"),
    [
        ({"rope_type": "dynamic", "factor": 4.0}, False),
        ({"rope_type": "dynamic", "alpha": 1000.0}, False),
        (LONG_ROPE, False),
        ({"rope_type": "bailing_mrope", "mrope_section": [8, 12, 12]}, True),
    ],
)
def test_rope_is_taken_where_its_angles_hang_on_the_position_alone(
    model_dir: Path, rope: dict[str, Any], refused: bool
) -> None:
    assert ("RoPE type" in reason(config(model_dir), rope=rope)) is refused


@pytest.mark.parametrize(
    ("rope", "trained", "refused"),
    [
        ({"rope_type": "dynamic", "factor": 4.0}, 512, False),
        ({"rope_type": "dynamic", "factor": 4.0}, 256, True),
        ({**LONG_ROPE, "original_max_position_embeddings": 512}, 2048, False),
        (LONG_ROPE, 2048, True),
    ],
)
def test_model_of_transformers_is_taken_up_to_the_window_of_its_first_angles(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, rope: dict[str, Any], trained: int, refused: bool
) -> None:
    made = config(model_dir)
    text = made.model_config.hf_text_config
    monkeypatch.setattr(text, "rope_parameters", rope)
    monkeypatch.setattr(text, "max_position_embeddings", trained)
    of_transformers = type("Model", (SimpleNamespace,), {"__module__": TransformersForCausalLM.__module__})
    model = of_transformers(model=SimpleNamespace(layers=[attention_layer(made)]))
    found = unsupported_reason(made, runner(FULL, 128), model)
    assert found == (f"RoPE type {rope['rope_type']} changes with the prompt's length" if refused else None)


@pytest.mark.parametrize("can_fail", [True, False])
def test_layers_with_windows_are_taken_where_vllm_can_be_told_of_failures(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, can_fail: bool
) -> None:
    monkeypatch.setattr(unsupported, "CAN_FAIL", can_fail)
    found = reason(config(model_dir), spec=WINDOW)
    assert found == "" if can_fail else "layers have windows" in found


def test_groups_of_other_kinds_are_refused(model_dir: Path) -> None:
    made = config(model_dir)
    layer = attention_layer(made)
    both = runner(FULL, 128)
    both.attn_groups += runner(SinkFullAttentionSpec(**vars(FULL), sink_len=128), 128).attn_groups
    found = unsupported_reason(made, both, SimpleNamespace(model=SimpleNamespace(layers=[layer])))
    assert "groups are of kinds" in (found or "")
