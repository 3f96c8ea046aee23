"""A check that this vLLM has what the other modules use of it."""

from __future__ import annotations

from inspect import signature
from typing import Any

from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, ParallelConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from blendrag.engine.compat import connector, groups, head_attention, model, norms, requests, start, states

# These import the rest: a missing name is an ImportError here, and not later in a worker.
_PARTS = (connector, groups, head_attention, model, norms, requests, start, states)


def missing() -> list[str]:
    """Return the members of vLLM's classes and functions that are used, and that this version lacks: an
    engine would start without them, and fail, or not blend, later."""
    used: dict[Any, str] = {
        AsyncEngineArgs: "kv_transfer_config worker_extension_cls structured_outputs_config",
        KVTransferConfig: "kv_connector_module_path kv_connector_extra_config kv_load_failure_policy",
        AsyncLLM: "from_engine_args collective_rpc reset_prefix_cache shutdown errored model_config",
        AsyncLLM.generate: "reasoning_ended reasoning_parser_kwargs",
        requests.SamplingParams: "extra_args output_kind structured_outputs",
        VllmConfig: "use_v2_model_runner speculative_config",
        CacheConfig: "block_size enable_prefix_caching",
        ModelConfig: "dtype max_model_len",
        ParallelConfig: "tensor_parallel_size data_parallel_index",
        Attention: (
            "layer_name num_heads num_kv_heads head_size kv_cache kv_cache_dtype attn_type attn_backend impl"
            " sliding_window kv_sharing_target_layer_name"
        ),
        MLAAttention: (
            "num_heads num_kv_heads head_size kv_lora_rank qk_nope_head_dim qk_rope_head_dim kv_cache_dtype"
            " scale use_sparse sliding_window attn_backend"
        ),
        RequestOutput: "outputs finished kv_transfer_params",
        CompletionOutput: "text token_ids finish_reason logprobs",
        Request: (
            "request_id kv_transfer_params cache_salt num_prompt_tokens num_computed_tokens num_preemptions"
            " all_token_ids"
        ),
        SchedulerOutput: ("num_scheduled_tokens finished_req_ids preempted_req_ids scheduled_cached_reqs"),
        connector.CachedRequestData: "req_ids resumed_req_ids new_block_ids",
        KVCacheBlocks: "get_block_ids",
        KVConnectorOutput: "kv_connector_worker_meta",
        KVCacheManager: "get_block_ids",
        MambaSpec: "block_size mamba_cache_mode",
        KVCacheConfig: "num_blocks kv_cache_groups",
        connector.KVConnectorBase_V1: (
            "get_num_new_matched_tokens update_state_after_alloc build_connector_meta update_connector_output"
            " request_finished start_load_kv wait_for_save get_finished"
            " get_block_ids_with_load_errors"
            " build_connector_worker_meta get_kv_connector_stats build_prom_metrics"
        ),
        AttentionBackend: "forward_includes_kv_cache_update",
        CommonAttentionMetadata: (
            "query_start_loc query_start_loc_cpu seq_lens num_reqs num_actual_tokens max_query_len"
            " max_seq_len block_table_tensor slot_mapping causal"
        ),
        set_forward_context: "num_tokens slot_mapping skip_compiled",
    }
    return [
        f"{thing.__qualname__}.{name}"
        for thing, names in used.items()
        for name in names.split()
        if not hasattr(thing, name) and name not in signature(thing).parameters and name not in _set_by(thing)
    ]


def _set_by(thing: Any) -> tuple[str, ...]:
    """Return the names in a class's ``__init__``, among them those of attributes that only instances have."""
    code = getattr(getattr(thing, "__init__", None), "__code__", None)
    return code.co_names if code else ()
