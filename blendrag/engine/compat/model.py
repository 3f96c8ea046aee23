"""A loaded model: its layers, and its paged cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Self

import torch
from vllm import envs
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.v1.attention.backend import CommonAttentionMetadata

from blendrag.attention.runs import Runs
from blendrag.attention.scores import Scores
from blendrag.engine.compat.layer_kv import KV, is_latent
from blendrag.engine.compat.platform import FP8_KV, is_cpu

# Structures that `known_layers.KnownDecoder` computes piecewise; anything else goes through whole layers.
KNOWN_ARCHITECTURES = frozenset(
    {
        "LlamaForCausalLM",
        "LlamaModel",  # in SmolVLM
        "MistralForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3LLMForCausalLM",  # in Qwen 3 VL
    }
)

# What the decoder for them uses of a layer.
_PARTS_OF_LAYER = "self_attn input_layernorm post_attention_layernorm mlp"
_PARTS_OF_ATTENTION = "qkv_proj q_size kv_size rotary_emb head_dim o_proj"

# Attention backends that keep K and V of a token and head next to each other.
_PACKED_BACKENDS = frozenset({"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"})


def text_model(model: Any) -> Any:
    """Return the causal LM inside a model that reads images, too, or the model itself."""
    inner = getattr(model, "get_language_model", None)
    return model if inner is None else inner()


def is_of_transformers(model: Any) -> bool:
    """Return whether vLLM has no layers of its own for a model, and runs those of transformers."""
    return type(model).__module__.startswith("vllm.model_executor.models.transformers")


def all_layers(model: Any) -> list[Any]:
    """Return the decoder layers of a causal LM, or an empty list where they are not where they usually
    are."""
    return list(getattr(_backbone(text_model(model)), "layers", ()))


def decoder_layers(model: Any) -> list[Any]:
    """Return the decoder layers up to the last one that keeps KV. Those behind it read the KV of earlier ones
    (Gemma 4 E2B, E4B), so that nothing of a prompt but its last token has to pass through them."""
    layers = all_layers(model)
    while layers and shares_kv(attention_of(layers[-1])):
        layers.pop()
    return layers


def shares_kv(attention: Any | None) -> bool:
    """Return whether an attention module reads the KV of an earlier layer's."""
    return getattr(attention, "kv_sharing_target_layer_name", None) is not None


class ForwardEnded(Exception):
    """The exception that ends the model's own forward where nothing more is to be learnt from it."""


def own_forward(model: Any, token_ids: torch.Tensor, positions: torch.Tensor) -> None:
    """Run a causal LM's own forward, not compiled, over [n] tokens, until something in it raises
    :class:`ForwardEnded`."""
    with suppress(ForwardEnded):
        if is_of_transformers(model):
            rows = {"input_ids": token_ids[None], "position_ids": positions[None]}
            _backbone(model).forward(**rows, use_cache=False, return_dict=False)
        else:
            _backbone(model).forward(token_ids, positions, None)


def _backbone(model: Any) -> Any:
    """Return what has the layers of a causal LM; itself, where a wrapper keeps no causal LM (SmolVLM)."""
    return getattr(model, "model", model)


def attention_of(layer: Any) -> Any | None:
    """Return the one vLLM attention module inside a decoder layer; None if there is none, or others, or a
    state."""
    found = [module for module in layer.modules() if isinstance(module, AttentionLayerBase)]
    known = len(found) == 1 and (isinstance(found[0], Attention) or is_latent(found[0]))
    return found[0] if known else None


def norm_behind_rope(layer: Any) -> Any | None:
    """Return the norm that a layer applies to K behind RoPE, as Llama 4 does. It has no weights, so RoPE may
    as well come behind it."""
    attention = getattr(layer, "self_attn", None)
    return getattr(attention, "qk_norm", None) if type(attention).__name__ == "Llama4Attention" else None


def rotary_of(layer: Any) -> Any | None:
    """Return the rotary module inside a decoder layer."""
    found = {id(m): m for m in layer.modules() if type(m).__name__.endswith("RotaryEmbedding")}
    return next(iter(found.values())) if len(found) == 1 else None


def leave_rows_whole(model: Any) -> None:
    """Prevent wrong results of a CPU's kernel in layers with windows and sinks. It divides a row's keys among
    threads by metadata that layers without windows share, and a part that is out of sight spoils the row."""
    found = [attention_of(layer) for layer in decoder_layers(model)]
    scores = [scores_of(attention) for attention in found if attention is not None]
    if is_cpu() and any(each and each.window and each.sinks is not None for each in scores):
        envs.VLLM_CPU_ATTN_SPLIT_KV = False  # replaces what vLLM would read from the environment


def normed(
    norm: Any, hidden: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``norm(hidden + residual)`` and the new residual stream. Both inputs may be overwritten."""
    return (norm(hidden), hidden) if residual is None else norm(hidden, residual)


def scaled_query(attention: Any, positions: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return [n, heads * head_size] as a known layer's ``self_attn`` scales it by position, if it does."""
    if not getattr(attention, "do_llama_4_scaling", False):
        return query
    return (query * attention._get_llama_4_attn_scale(positions)).to(query.dtype)


def scale_of(attention: Any) -> float:
    """Return the factor by which an attention module multiplies the products of queries and keys."""
    return float(attention.impl.scale)


def scores_of(attention: Any) -> Scores | None:
    """Return what an attention module does with the products of queries and keys; None if it is something
    else: chunked or prefix attention, which are subclasses of vLLM's, ALiBi."""
    impl = attention.impl
    other = getattr(impl, "alibi_slopes", None) is not None or getattr(impl, "chunk_lookback", -1) >= 0
    if is_latent(attention):
        return Scores(float(attention.scale))
    if other or type(attention) is not Attention:
        return None
    cap, sinks = getattr(impl, "logits_soft_cap", None), getattr(impl, "sinks", None)
    return Scores(impl.scale, attention.sliding_window, cap or 0.0, sinks)


def key_value_of(attention: Any, cache: torch.Tensor) -> KV | None:
    """Return K and V in the paged ``cache`` of an attention module, or in one like it: views, [blocks,
    block_size, kv_heads, head_size] each, to be multiplied by :func:`scales_of`. None if the layout is not
    known.

    Since vLLM 0.26 these backends agree on [blocks, kv_heads, block_size, K and V]; strides tell NHD, HND and
    layouts that join layers apart.
    """
    shape = (attention.num_kv_heads, cache.shape[-2], 2 * attention.head_size)
    known = attention.attn_backend.get_name() in _PACKED_BACKENDS and tuple(cache.shape[1:]) == shape
    fp8 = _fp8_of(attention)
    if not known or (fp8 is None and cache.dtype not in (torch.float32, torch.bfloat16, torch.float16)):
        return None
    if fp8 is not None:
        cache = cache.view(fp8)
    key, value = cache.transpose(1, 2).split(attention.head_size, dim=-1)
    return key, value


def _fp8_of(attention: Any) -> torch.dtype | None:
    """Return the type in which an attention module's cache holds K and V; None if it is that of the model."""
    if attention.kv_cache_dtype not in FP8_KV:
        return None
    return torch.float8_e5m2 if attention.kv_cache_dtype == "fp8_e5m2" else torch.float8_e4m3fn


def scales_of(attention: Any) -> tuple[float, float] | None:
    """Return by what K and V in an attention module's cache are to be multiplied; None: by nothing."""
    return None if _fp8_of(attention) is None else (attention._k_scale_float, attention._v_scale_float)


def exactly_kept(attention: Any, key: torch.Tensor, value: torch.Tensor) -> KV:
    """Return K and V that are near these, and that an attention module's cache holds without rounding: how it
    rounds depends on the device."""
    fp8, scales = _fp8_of(attention), scales_of(attention)
    if fp8 is None or scales is None:
        return key, value
    key, value = (
        ((part.float() / scale).to(fp8).float() * scale).to(part.dtype)
        for part, scale in zip((key, value), scales, strict=True)
    )
    return key, value


def block_format(attentions: Sequence[Any]) -> str:
    """Return backend, instruction set, type, shape and order in memory of a block, of layers that agree in
    them."""

    def of(one: Any) -> str:
        cache, isa = one.kv_cache, isa_of(one)
        return f"{one.attn_backend.get_name()} {isa} {cache.dtype} {(*cache.shape[1:],)} {cache.stride()[1:]}"

    return "; ".join(sorted(set(map(of, attentions))))


def cache_of(attention: Any) -> torch.Tensor:
    """Return the paged cache of an attention module."""
    return attention.kv_cache


def isa_of(attention: Any) -> str:
    """Return which instructions a CPU's backend computes an attention module with, by the backend's name."""
    return getattr(attention, "isa", "")


def name_of(attention: Any) -> str:
    """Return the name by which the backend's metadata knows an attention module."""
    return attention.layer_name


def heads_of(attention: Any) -> int:
    """Return how many heads Q of an attention module has."""
    return attention.num_heads


def has_known_parts(model: Any) -> bool:
    """Return whether a model's layers have what they are computed of piece by piece, and nothing else."""
    return type(model).__name__ in KNOWN_ARCHITECTURES and all(
        all(hasattr(layer, name) for name in _PARTS_OF_LAYER.split())
        and all(hasattr(layer.self_attn, name) for name in _PARTS_OF_ATTENTION.split())
        and getattr(layer, "ada_rms_norm_t_cond", None) is None
        for layer in decoder_layers(model)
    )


def output_weight(layer: Any, attention: Any) -> torch.Tensor | None:
    """Return the weight, [hidden, heads * head_size], of the output projection next to a decoder layer's
    attention, whatever its name; None if there is none. It is read off as the output for one-hot rows, since
    backends keep weights in orders of their own."""
    siblings = [
        one
        for module in layer.modules()
        if any(child is attention for child in module.children())
        for one in module.children()
        if isinstance(one, RowParallelLinear)
    ]
    if len(siblings) != 1:
        return None
    width = attention.num_heads * attention.head_size
    one_hot = torch.eye(width, dtype=attention.kv_cache.dtype, device=attention.kv_cache.device)
    return siblings[0].quant_method.apply(siblings[0], one_hot, None).T


def attend(attention: Any, query: torch.Tensor, cache: torch.Tensor, metadata: Any) -> torch.Tensor:
    """Return the attention of ``query``, [m, heads, head_size], over what ``metadata`` addresses in
    ``cache``; same shape."""
    out = torch.empty_like(query)
    # The backends read K and V from the cache; the arguments only carry shapes.
    nothing = query.new_empty(query.shape[0], attention.num_kv_heads, attention.head_size)
    attention.impl.forward(attention, query, nothing, nothing, cache, metadata, out)
    return out


def attention_metadata(
    runner: Any, group: int, runs: Runs, block_table: torch.Tensor, slots: torch.Tensor
) -> dict[str, Any]:
    """Return the backend's own metadata for ``runs`` as pseudo-requests, by the names of a group's attention
    layers. Only for the CPU: elsewhere builders fill buffers that the engine's running step may read.

    block_table: [sequences, blocks] int32.
    """
    query_start = torch.from_numpy(runs.query_start)
    common = CommonAttentionMetadata(
        query_start_loc=query_start,
        query_start_loc_cpu=query_start,
        seq_lens=torch.from_numpy(runs.seq_lens),
        num_reqs=runs.count,
        num_actual_tokens=slots.numel(),
        max_query_len=runs.max_query_len,
        max_seq_len=int(runs.seq_lens.max()),
        block_table_tensor=block_table[torch.from_numpy(runs.sequences)],
        slot_mapping=slots,
        causal=True,
    )
    by_layer: dict[str, Any] = {}
    for kind in runner.attn_groups[group]:
        metadata = kind.get_metadata_builder(0).build(0, common)
        by_layer.update(dict.fromkeys(kind.layer_names, metadata))
    return by_layer


def scratch_cache(attention: Any, blocks: int) -> torch.Tensor:
    """Return a paged cache of ``blocks`` blocks for one layer, laid out in memory as the engine's is."""
    like = attention.kv_cache
    order = sorted(range(like.dim()), key=lambda dim: like.stride(dim), reverse=True)
    shape = [blocks, *like.shape[1:]]
    empty = torch.zeros([shape[dim] for dim in order], dtype=like.dtype, device=like.device)
    return empty.permute([order.index(dim) for dim in range(like.dim())])


@contextmanager
def layer_context(vllm_config: Any, tokens: int) -> Iterator[None]:
    """Set up what a whole decoder layer expects around it when it runs outside the engine's own forward."""
    with (
        set_current_vllm_config(vllm_config),
        set_forward_context({}, vllm_config, num_tokens=tokens, slot_mapping={}, skip_compiled=True),
    ):
        yield


class LoadedWorker(NamedTuple):
    """A worker's model, and what its engine is configured with. ranks: how many share each layer. first: of
    data parallel engines, the first."""

    model: Any
    device: torch.device
    dtype: str
    block_size: int
    prefix_caching: bool
    ranks: int
    first: bool

    @classmethod
    def of(cls, vllm_config: Any, runner: Any) -> Self:
        parallel = vllm_config.parallel_config
        return cls(
            model=runner.get_model(),
            device=runner.device,
            dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
            block_size=vllm_config.cache_config.block_size,
            prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
            ranks=parallel.tensor_parallel_size,
            first=parallel.data_parallel_index == 0,
        )
