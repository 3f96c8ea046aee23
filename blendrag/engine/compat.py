"""Every name of vLLM that blendrag uses, in one place; no other module imports vLLM. For which versions, says
``client/requirement.py``.

Outside of vLLM's own processes this module is imported when an engine is wanted: it takes seconds.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import lru_cache
from importlib.util import find_spec
from inspect import signature
from itertools import islice
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn, Self

import torch
from vllm import SamplingParams, envs, exceptions
from vllm import __version__ as VLLM_VERSION
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.model_loader import DefaultModelLoader, register_model_loader
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.attention.backend import AttentionBackend, AttentionType, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor

from blendrag.adapter import Adapter
from blendrag.attention.runs import Runs
from blendrag.attention.scores import Scores
from blendrag.errors import ConfigError

try:
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as SlotLogitsProcessor
except ModuleNotFoundError:  # before 0.31 the second model runner takes none: with one, the first is chosen
    LogitsContext, SlotLogitsProcessor = Any, object

VLLMClientError = getattr(exceptions, "VLLMClientError", ValueError)  # before 0.27 they are ValueErrors

__all__ = [  # passed on; the functions below use the rest
    "VLLM_VERSION",
    "BatchUpdate",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorWorkerMetadata",
    "LogitsContext",
    "LogitsProcessor",
    "RequestOutputKind",
    "SamplingParams",
    "SlotLogitsProcessor",
    "StructuredOutputsParams",
    "VLLMClientError",
    "get_kv_transfer_group",
    "process_dict_updates",
]

LOGGER = logging.getLogger("vllm")  # above all of its own

# Structures that `decoder.KnownDecoder` computes piecewise; anything else goes through whole layers.
KNOWN_ARCHITECTURES = frozenset(
    {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    }
)

# RoPE types whose angle is a function of the position alone.
_STATIC_ROPES = frozenset(
    {
        "RotaryEmbedding",
        "Llama3RotaryEmbedding",
        "LinearScalingRotaryEmbedding",
        "YaRNScalingRotaryEmbedding",
        "NTKScalingRotaryEmbedding",
        "Gemma4RotaryEmbedding",
    }
)

# Attention backends that keep a token's K and V of a head side by side.
_PACKED_BACKENDS = frozenset({"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"})
# Of a KV cache that holds numbers as they are computed.
_PLAIN_KV = frozenset({"auto", "float16", "bfloat16"})


def missing() -> list[str]:
    """What is used of vLLM's classes and functions, and this version's do not have: an engine would start
    without it, and fail, or not blend, later."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    used: dict[Any, str] = {
        AsyncEngineArgs: "kv_transfer_config worker_extension_cls structured_outputs_config",
        KVTransferConfig: "kv_connector_module_path kv_connector_extra_config kv_load_failure_policy",
        AsyncLLM: "from_engine_args collective_rpc reset_prefix_cache shutdown errored",
        AsyncLLM.generate: "reasoning_ended reasoning_parser_kwargs",
        SamplingParams: "extra_args output_kind structured_outputs",
        VllmConfig: "use_v2_model_runner",
        KVConnectorBase_V1: (
            "get_num_new_matched_tokens update_state_after_alloc build_connector_meta update_connector_output"
            " request_finished start_load_kv get_finished get_block_ids_with_load_errors"
            " build_connector_worker_meta get_kv_connector_stats build_prom_metrics"
        ),
        AttentionBackend: "forward_includes_kv_cache_update",
        CommonAttentionMetadata: (
            "query_start_loc query_start_loc_cpu seq_lens num_reqs num_actual_tokens max_query_len"
            " max_seq_len block_table_tensor slot_mapping causal"
        ),
        set_forward_context: "num_tokens slot_mapping",
    }
    return [
        f"{thing.__qualname__}.{name}"
        for thing, names in used.items()
        for name in names.split()
        if not hasattr(thing, name) and name not in signature(thing).parameters
    ]


def argument_names() -> frozenset[str]:
    """Names of vLLM's engine arguments."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    return frozenset(field.name for field in fields(AsyncEngineArgs))


def start_llm(arguments: dict[str, Any], connector: dict[str, Any]) -> Any:
    """An ``AsyncLLM`` and its processes. Blocks until they are ready, or raises what vLLM does.

    Without the connector for models that keep a state instead of KV, in some layers or all: they are not
    blended, and vLLM starts them only with one that tells groups of layers apart.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    args = AsyncEngineArgs(**arguments)
    if keeps_kv(arguments):
        args.kv_transfer_config = KVTransferConfig(**connector)
    return AsyncLLM.from_engine_args(args)


def keeps_kv(arguments: dict[str, Any]) -> bool:
    """Whether all layers of the model that these engine arguments name keep KV."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    model = AsyncEngineArgs(**arguments).create_model_config()
    return not (model.is_hybrid or model.is_attention_free)


def server_options(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """What vLLM's server makes of its command line, by name, and the words that it has no use for. Raises
    ConfigError for a value that it refuses."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ConfigError(message)

    options, left = make_arg_parser(Parser()).parse_known_args(list(words))
    return vars(options), left


_MERGING = "blendrag_merging"


def merging_loader(adapter: Adapter) -> dict[str, Any]:
    """Engine arguments with which the adapter is merged into the weights."""
    return {"load_format": _MERGING, "model_loader_extra_config": {"adapter": str(adapter.folder)}}


@register_model_loader(_MERGING)
class _MergingLoader(DefaultModelLoader):
    """vLLM's usual one with another source of weights. Workers have it when they import this module."""

    def __init__(self, load_config: Any) -> None:
        self._adapter = Adapter(Path(load_config.model_loader_extra_config["adapter"]))
        super().__init__(replace(load_config, load_format="auto", model_loader_extra_config={}))

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self._adapter.merged(super().get_all_weights(model_config, model))


class MemoryPlan(NamedTuple):
    """What an engine may take, in bytes. device: all there is. share: of it, for weights and KV together.
    cache: for KV, where that is given; window: tokens of the longest prompt; prompt: its KV, by full
    attention."""

    device: int
    share: int
    cache: int | None
    window: int
    prompt: int


def memory_plan(arguments: dict[str, Any]) -> MemoryPlan:
    """Of an engine with these arguments. Raises what vLLM does where they are wrong."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    config = AsyncEngineArgs(**arguments).create_engine_config()
    model, cache = config.model_config, config.cache_config
    numbers = 2 * model.get_num_layers(config.parallel_config) * model.get_head_size()
    numbers *= model.get_num_kv_heads(config.parallel_config)
    device = int(current_platform.get_device_total_memory())
    share = int(device * cache.gpu_memory_utilization)
    bytes_each = 1 if cache.cache_dtype not in _PLAIN_KV else model.dtype.itemsize
    window = model.max_model_len
    return MemoryPlan(device, share, cache.kv_cache_memory_bytes, window, numbers * bytes_each * window)


def reasoning_parsers() -> list[str]:
    """The names of vLLM's reasoning parsers."""
    from vllm.reasoning import ReasoningParserManager

    return list(ReasoningParserManager.list_registered())


def reasoning_parser(name: str, tokenizer: Any, chat_template_kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """A vLLM ``Parser`` for one answer, and the request that its methods take, which says what it needs of
    the detokenizer. Raises what that parser does for a tokenizer without its tokens."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser import ParserManager

    kind = ParserManager.get_parser(reasoning_parser_name=name, is_harmony=name == "openai_gptoss")
    assert kind is not None, "the name is none of the registered ones"
    parser = kind(_with_vocabulary(tokenizer), chat_template_kwargs=dict(chat_template_kwargs))
    return parser, parser.adjust_request(ChatCompletionRequest(messages=[]))


@lru_cache(maxsize=1)
def _with_vocabulary(tokenizer: Any) -> Any:
    """The tokenizer with its vocabulary at hand, which every parser asks for and transformers makes anew."""
    from vllm.tokenizers.hf import get_cached_tokenizer

    return get_cached_tokenizer(tokenizer)


def detokenizer(tokenizer: Any, prompt: list[int], skip_special_tokens: bool) -> Callable[[int], str]:
    """Gives the text that each token adds to an answer, as the engine does. To be called in their order."""
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

    params = SamplingParams(skip_special_tokens=skip_special_tokens)
    request = SimpleNamespace(request_id="", prompt_token_ids=prompt, sampling_params=params)
    return FastIncrementalDetokenizer(tokenizer, request).decode_next


def engine_processes() -> list[BaseProcess]:
    """The processes that ``AsyncLLM``s of this one have started; workers are children of theirs."""
    return [child for child in multiprocessing.active_children() if child.name.startswith("EngineCore")]


def is_cpu() -> bool:
    """Whether vLLM computes on the CPU."""
    return bool(current_platform.is_cpu())


def takes_back_steps(vllm_config: Any) -> bool:
    """Whether a step is undone right if KV that was promised for it turns out not to be there. Asynchronous
    scheduling keeps the place of the token that the step gave; the second model runner counts on from it."""
    scheduled_ahead = vllm_config.scheduler_config.async_scheduling
    return is_cpu() and not scheduled_ahead and not vllm_config.use_v2_model_runner


def device_name(device: object) -> str:
    """A torch device, with the product's name if it is an accelerator."""
    return str(device) if is_cpu() else f"{device} ({current_platform.get_device_name()})"


def decoder_layers(model: Any) -> list[Any]:
    """The decoder layers of a causal LM, or an empty list where they are not where they usually are."""
    return list(getattr(getattr(model, "model", None), "layers", ()))


def attention_of(layer: Any) -> Any | None:
    """The one vLLM attention module inside a decoder layer; None if there is none, or others, or a state."""
    found = [module for module in layer.modules() if isinstance(module, AttentionLayerBase)]
    return found[0] if len(found) == 1 and isinstance(found[0], Attention) else None


def rotary_of(layer: Any) -> Any | None:
    """The rotary module inside a decoder layer."""
    found = {id(m): m for m in layer.modules() if type(m).__name__.endswith("RotaryEmbedding")}
    return next(iter(found.values())) if len(found) == 1 else None


def unsupported_reason(vllm_config: Any, runner: Any, model: Any) -> str | None:
    """Why this model cannot be blended, or None."""
    parallel = vllm_config.parallel_config
    if parallel.world_size_across_dp > 1:  # others would wait for a rank that blends, or lack its KV
        return "parallel engines (tensor, pipeline, data, expert, context) are not blended yet"
    if vllm_config.speculative_config:
        return "speculative decoding cannot be combined with blending"
    layers = decoder_layers(model)
    if not layers:
        return f"{type(model).__name__} has no model.layers"
    for number, layer in enumerate(layers):
        reason = _unsupported_layer(layer)
        if reason:
            return f"layer {number}: {reason}"
    if len({(each.num_kv_heads, each.head_size) for each in map(attention_of, layers) if each}) > 1:
        return "KV of some of its layers has another shape than that of others"
    if len(runner.attn_groups) != 1:
        return "the model needs several KV cache groups"
    if any(isinstance(group.kv_cache_spec, SlidingWindowSpec) for group in runner.attn_groups[0]):
        return "all of its layers have windows: the engine gives up the KV behind them"
    if any(_splits_blocks(group) for group in runner.attn_groups[0]):
        return "the attention backend splits KV blocks"
    return None


def leave_rows_whole(model: Any) -> None:
    """Where a CPU's kernel would compute layers with windows and sinks wrongly. It divides a row's keys among
    threads by metadata that layers without windows share, and a part that is out of sight spoils the row."""
    found = [attention_of(layer) for layer in decoder_layers(model)]
    scores = [scores_of(attention) for attention in found if attention is not None]
    if is_cpu() and any(each and each.window and each.sinks is not None for each in scores):
        envs.VLLM_CPU_ATTN_SPLIT_KV = False  # over what vLLM would read of the environment


def _splits_blocks(group: Any) -> bool:
    """Whether the backend's blocks are smaller than those of vLLM's pool."""
    builder = group.get_metadata_builder()
    return bool(builder.kv_cache_spec.block_size != group.kv_cache_spec.block_size)


def _unsupported_layer(layer: Any) -> str | None:
    attention, rotary = attention_of(layer), rotary_of(layer)
    if attention is None:
        return "it has no single attention module (MLA, Mamba and hybrid layers are not blended)"
    if attention.attn_type != AttentionType.DECODER or attention.kv_sharing_target_layer_name:
        return "its attention is not plain causal self-attention"
    if attention.kv_cache_dtype not in _PLAIN_KV:
        return f"its KV cache is quantised (kv_cache_dtype {attention.kv_cache_dtype})"
    if attention.attn_backend.forward_includes_kv_cache_update:
        return f"backend {attention.attn_backend.get_name()} does not write KV separately"
    if rotary is None:
        return "it has no rotary position embedding of its own"
    if type(rotary).__name__ not in _STATIC_ROPES:
        return f"RoPE type {type(rotary).__name__} changes with the prompt's length or modality"
    return None if is_cpu() else _unread_cache(attention)


def _unread_cache(attention: Any) -> str | None:
    """Why attention over the paged cache (`attention/paged.py`) cannot stand for this module's."""
    if find_spec("triton") is None:
        return "Triton is not installed: install the build of torch for this device"
    if key_value_of(attention, attention.kv_cache) is None:
        backend, dtype = attention.attn_backend.get_name(), attention.kv_cache.dtype
        return f"how backend {backend} keeps KV of type {str(dtype).removeprefix('torch.')} is not known"
    if scores_of(attention) is None:
        return f"{type(attention).__name__} sees other keys than those before a token"
    return None


def output_ids_not_read(runner: Any) -> None:
    """For logits processors that count a request's output ids and read none. vLLM's first model runner, which
    cannot know, would have every step of asynchronous scheduling wait for the last one's."""
    if hasattr(runner, "input_batch"):  # the second one does not keep the ids on the host
        runner.input_batch.logitsprocs_need_output_token_ids = False


def rotate(rotary: Any, positions: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Apply the model's own RoPE to [n, heads * head_size], in place where the platform's kernel is."""
    rotated, _ = rotary(positions, heads, None)
    return rotated


def rms_norm(
    norm: Any, hidden: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``norm(hidden + residual)`` and the new residual stream. Both inputs may be overwritten.

    vLLM's CPU platform runs RMSNorm as several PyTorch kernels; its own fused kernel is 20 times faster.
    """
    plain = type(norm) is RMSNorm and norm.has_weight and norm.variance_size_override is None
    if not plain or not _has_fused_norm():
        if residual is None:
            return norm(hidden), hidden
        return norm(hidden, residual)
    if residual is None:
        out = torch.empty_like(hidden)
        torch.ops._C.rms_norm(out, hidden, norm.weight, norm.variance_epsilon)
        return out, hidden
    torch.ops._C.fused_add_rms_norm(hidden, residual, norm.weight, norm.variance_epsilon)
    return hidden, residual


def _has_fused_norm() -> bool:
    return hasattr(torch.ops._C, "fused_add_rms_norm") and hasattr(torch.ops._C, "rms_norm")


def write_kv(attention: Any, key: torch.Tensor, value: torch.Tensor, cache: Any, slots: torch.Tensor) -> None:
    """Write [n, kv_heads, head_size] K and V to int64 ``slots``, in the backend's own layout."""
    attention.impl.do_kv_cache_update(attention, key, value, cache, slots)


def attend(attention: Any, query: torch.Tensor, cache: torch.Tensor, metadata: Any) -> torch.Tensor:
    """Attention of [m, heads, head_size] over what ``metadata`` addresses in ``cache``; same shape."""
    out = torch.empty_like(query)
    # The backends read K and V from the cache; the arguments only carry shapes.
    nothing = query.new_empty(query.shape[0], attention.num_kv_heads, attention.head_size)
    attention.impl.forward(attention, query, nothing, nothing, cache, metadata, out)
    return out


def scores_of(attention: Any) -> Scores | None:
    """What an attention module does with the products of queries and keys; None if that is something else:
    chunked or prefix attention, which are subclasses of vLLM's, ALiBi."""
    impl = attention.impl
    other = getattr(impl, "alibi_slopes", None) is not None or getattr(impl, "chunk_lookback", -1) >= 0
    if other or type(attention) is not Attention:
        return None
    cap, sinks = getattr(impl, "logits_soft_cap", None), getattr(impl, "sinks", None)
    return Scores(impl.scale, attention.sliding_window, cap or 0.0, sinks)


def key_value_of(attention: Any, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """K and V in the paged ``cache`` of an attention module, or in one like it: views, [blocks, block_size,
    kv_heads, head_size] each. None where they are not known to lie so, or are quantized.

    Since vLLM 0.26 these backends agree on [blocks, kv_heads, block_size, K and V]; strides tell NHD, HND and
    layouts that join layers apart.
    """
    shape = (attention.num_kv_heads, cache.shape[-2], 2 * attention.head_size)
    known = attention.attn_backend.get_name() in _PACKED_BACKENDS and tuple(cache.shape[1:]) == shape
    if not known or cache.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    key, value = cache.transpose(1, 2).split(attention.head_size, dim=-1)
    return key, value


def attention_metadata(
    runner: Any, runs: Runs, block_table: torch.Tensor, slots: torch.Tensor
) -> dict[str, Any]:
    """The backend's own metadata for ``runs`` as pseudo-requests, by attention layer name. On the CPU only:
    elsewhere builders fill buffers that the engine's running step may read.

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
    for group in runner.attn_groups[0]:
        metadata = group.get_metadata_builder(0).build(0, common)
        by_layer.update(dict.fromkeys(group.layer_names, metadata))
    return by_layer


def scratch_cache(attention: Any, blocks: int) -> torch.Tensor:
    """A paged cache of ``blocks`` blocks for one layer, laid out in memory as the engine's is."""
    like = attention.kv_cache
    order = sorted(range(like.dim()), key=lambda dim: like.stride(dim), reverse=True)
    shape = [blocks, *like.shape[1:]]
    empty = torch.zeros([shape[dim] for dim in order], dtype=like.dtype, device=like.device)
    return empty.permute([order.index(dim) for dim in range(like.dim())])


@contextmanager
def layer_context(
    vllm_config: Any, metadata: dict[str, Any], slots: dict[str, torch.Tensor], tokens: int
) -> Iterator[None]:
    """What a whole decoder layer expects around it when it runs outside the engine's own forward."""
    with (
        set_current_vllm_config(vllm_config),
        set_forward_context(metadata, vllm_config, num_tokens=tokens, slot_mapping=slots),
    ):
        yield


class FreeBlocks:
    """vLLM's pool of KV blocks (``BlockPool``, which it hands to connectors), and the order in which it takes
    the free ones. All names are public ones of the pool, its ``FreeKVCacheBlockQueue`` and its blocks."""

    def __init__(self, pool: Any) -> None:
        self._blocks, self._queue = pool.blocks, pool.free_block_queue

    @classmethod
    def of(cls, pool: Any) -> Self | None:
        """None if this vLLM's pool is another one."""
        queue, block = getattr(pool, "free_block_queue", None), next(iter(getattr(pool, "blocks", ())), None)
        calls = ("iter_blocks_after", "remove", "popleft_n", "prepend_n")
        facts = ("ref_cnt", "block_hash", "is_null")
        fits = all(callable(getattr(queue, name, None)) for name in calls)
        return cls(pool) if fits and all(hasattr(block, name) for name in facts) else None

    def __len__(self) -> int:
        return len(self._blocks)

    def holds(self, block_id: int) -> bytes | None:
        """By which hash the block's KV is found; None if it is not."""
        return self._blocks[block_id].block_hash

    def is_free(self, block_id: int) -> bool:
        block = self._blocks[block_id]
        return block.ref_cnt == 0 and not block.is_null

    def empty_in_front(self, most: int) -> int:
        """How many free blocks hold nothing and are taken before any that does; ``most``: so many or more."""
        for number, block in enumerate(islice(self._queue.iter_blocks_after(None), most)):
            if block.block_hash is not None:
                return number
        return min(most, self._queue.num_free_blocks)

    def put_behind(self, first: int, block_ids: Sequence[int]) -> None:
        """These free blocks, none of them among the ``first`` of the queue, are taken right after those."""
        moved = [self._blocks[block_id] for block_id in block_ids]
        for block in moved:
            self._queue.remove(block)
        self._queue.prepend_n([*self._queue.popleft_n(first), *moved])
