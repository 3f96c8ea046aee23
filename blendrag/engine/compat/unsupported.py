"""Why a model that is loaded cannot be blended."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from blendrag.engine.compat.layer_kv import is_latent, layer_kv, stored_shape, unread_latents
from blendrag.engine.compat.model import (
    all_layers,
    attention_of,
    decoder_layers,
    is_of_transformers,
    key_value_of,
    rotary_of,
    scores_of,
    shares_kv,
)
from blendrag.engine.compat.parallel import divided_otherwise
from blendrag.engine.compat.platform import FP8_KV, PLAIN_KV, is_cpu
from blendrag.engine.compat.states import CAN_FAIL
from blendrag.store.identity import kv_shape, sharing_layers

# RoPE types whose angle is a function of the position alone. Of those that others change with the prompt's
# length (dynamic NTK, LongRoPE), vLLM has one kind of angles for an engine.
_STATIC_ROPES = frozenset(
    {
        "RotaryEmbedding",
        "Llama3RotaryEmbedding",
        "LinearScalingRotaryEmbedding",
        "YaRNScalingRotaryEmbedding",
        "NTKScalingRotaryEmbedding",
        "DynamicNTKScalingRotaryEmbedding",
        "DynamicNTKAlphaRotaryEmbedding",
        "Phi3LongRoPEScaledRotaryEmbedding",
        "Gemma4RotaryEmbedding",
        "DeepseekScalingRotaryEmbedding",
        # Those for images and text. A text's tokens have the same position three times.
        "MRotaryEmbedding",
        "MRotaryEmbeddingInterleaved",
    }
)

# Types of RoPE whose angles transformers' own code changes behind the window of their first ones.
_MOVING_ROPES = frozenset({"dynamic", "longrope"})

# How layers are kept where some are kept otherwise than others.
_GROUPED = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)


def unsupported_reason(vllm_config: Any, runner: Any, model: Any) -> str | None:
    """Return why this model cannot be blended, or None."""
    if reason := divided_otherwise(vllm_config.parallel_config):
        return reason
    layers = decoder_layers(model)
    if not layers:
        return f"{type(model).__name__} has no model.layers"
    if is_of_transformers(model) and (rope := _moving_rope(vllm_config)):
        return f"RoPE type {rope} changes with the prompt's length"
    for number, layer in enumerate(layers):
        reason = unsupported_layer(layer)
        if reason:
            return f"layer {number}: {reason}"
    config = vllm_config.model_config.hf_text_config.to_dict()
    sharing, by_config = len(all_layers(model)) - len(layers), sharing_layers(config)
    if sharing != by_config:
        return f"{sharing} of its layers read the KV of others, and by its config.json {by_config}"
    attentions: list[Any] = [attention_of(layer) for layer in layers]
    shape = stored_shape([layer_kv(attention) for attention in attentions])
    expected = kv_shape(config)
    alone = vllm_config.parallel_config.tensor_parallel_size == 1  # else a rank has some of the heads
    if shape is None or expected is None or shape[not alone :] != expected[not alone :]:
        return f"the common shape of its layers' KV is {shape}, and by its config.json {expected}"
    block_size = vllm_config.cache_config.block_size
    if any(is_latent(each) and each.kv_cache.shape[-2] != block_size for each in attentions):
        return "the attention backend splits KV blocks"
    kinds = [kind for group in runner.attn_groups for kind in group]
    behind = SlidingWindowSpec | ChunkedLocalAttentionSpec
    if any(isinstance(kind.kv_cache_spec, behind) for kind in kinds) and not CAN_FAIL:
        return "layers have windows, and this vLLM cannot be told that what is behind them is missing"
    known = all(runner.attn_groups) and all(type(kind.kv_cache_spec) in _GROUPED for kind in kinds)
    if len(runner.attn_groups) > 1 and not known:
        return "its KV cache groups are of kinds that are not known"
    if any(_splits_blocks(kind) for kind in kinds):
        return "the attention backend splits KV blocks"
    return None


def _moving_rope(vllm_config: Any) -> str | None:
    """Return the type of RoPE, of one layer type or of all, of a model of transformers' if it changes with a
    prompt's length, in a window as long as the engine's."""
    model = vllm_config.model_config
    given = getattr(model.hf_text_config, "rope_parameters", None) or {}
    for rope in (given, *given.values()):
        if isinstance(rope, dict) and (kind := rope.get("rope_type")) in _MOVING_ROPES:
            first = (
                rope.get("original_max_position_embeddings") or model.hf_text_config.max_position_embeddings
            )
            if model.max_model_len > first:
                return str(kind)
    return None


def _splits_blocks(group: Any) -> bool:
    """Return whether the backend's blocks are smaller than those of vLLM's pool. Latents, and layers that
    differ in shape, are in blocks of the pool's size."""
    spec = group.kv_cache_spec
    if not isinstance(spec, AttentionSpec) or isinstance(spec, MLAAttentionSpec):
        return False
    return bool(group.get_metadata_builder().kv_cache_spec.block_size != spec.block_size)


def unsupported_layer(layer: Any) -> str | None:
    """Return why a decoder layer cannot be blended, or None."""
    attention, rotary = attention_of(layer), rotary_of(layer)
    if attention is None:
        return "it has no single attention module (Mamba and hybrid layers are not blended)"
    if is_latent(attention):
        if attention.kv_cache_dtype not in PLAIN_KV:
            return f"how its latent KV is quantised is not known (kv_cache_dtype {attention.kv_cache_dtype})"
        return unread_latents(attention) or _moving(rotary)
    if attention.attn_type != AttentionType.DECODER or shares_kv(attention):
        return "its attention is not plain causal self-attention"
    if getattr(attention, "head_size_v", attention.head_size) != attention.head_size:
        return "its V has another size than its K"
    if attention.kv_cache_dtype not in PLAIN_KV | FP8_KV:
        return f"how its KV cache is quantised is not known (kv_cache_dtype {attention.kv_cache_dtype})"
    if attention.attn_backend.forward_includes_kv_cache_update:
        return f"backend {attention.attn_backend.get_name()} does not write KV separately"
    return _moving(rotary) or (None if is_cpu() else _unread_cache(attention))


def _moving(rotary: Any | None) -> str | None:
    if rotary is None or type(rotary).__name__ in _STATIC_ROPES:
        return None
    return f"RoPE type {type(rotary).__name__} changes with the prompt's length or modality"


def _unread_cache(attention: Any) -> str | None:
    """Return why attention over the paged cache (`attention/paged.py`) cannot replace this module's."""
    if find_spec("triton") is None:
        return "Triton is not installed: install the build of torch for this device"
    if key_value_of(attention, attention.kv_cache) is None:
        backend, dtype = attention.attn_backend.get_name(), attention.kv_cache.dtype
        return f"how backend {backend} keeps KV of type {str(dtype).removeprefix('torch.')} is not known"
    if scores_of(attention) is None:
        return f"{type(attention).__name__} sees other keys than those before a token"
    return None
