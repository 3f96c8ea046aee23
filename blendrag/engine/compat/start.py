"""The start of an engine or a server: arguments, and the memory it needs."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import fields
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, NoReturn

from vllm.config import KVTransferConfig, VllmConfig
from vllm.platforms import current_platform

from blendrag.engine.compat.platform import PLAIN_KV
from blendrag.engine.compat.states import CAN_FAIL
from blendrag.errors import ConfigError
from blendrag.store.identity import sharing_layers


def argument_names() -> frozenset[str]:
    """Return the names of vLLM's engine arguments."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    return frozenset(field.name for field in fields(AsyncEngineArgs))


def no_embeddings_from_clients() -> None:
    """Have vLLM (from 0.32) not take our connector for that of an engine which another one sends embeddings
    of images to: it would accept them from any client, who could end it with one of a wrong shape, and load
    what reads images even for texts alone. ``enable_mm_embeds`` is left to whoever wants it."""
    if hasattr(VllmConfig, "_resolve_mm_embedding_inputs"):
        VllmConfig._resolve_mm_embedding_inputs = lambda self: None


# Arguments beside which a hybrid model keeps other states, or prompts share parts of blocks.
_WITHOUT_STATES = ("use_replayssm", "prefix_match_unit")


def start_llm(arguments: dict[str, Any], connector: dict[str, Any]) -> Any:
    """Start an ``AsyncLLM`` and its processes. Blocks until they are ready, or raises vLLM's error."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    no_embeddings_from_clients()
    args = AsyncEngineArgs(**arguments)
    fitting, _ = fitting_connector(arguments, connector)
    if fitting is not None:
        args.kv_transfer_config = KVTransferConfig(**fitting)
    return AsyncLLM.from_engine_args(args)


def fitting_connector(
    arguments: dict[str, Any], connector: dict[str, Any]
) -> tuple[dict[str, Any] | None, str]:
    """Return the connector's arguments for the model that these engine arguments name. None, and why, where
    vLLM starts it only with a connector that tells groups of layers apart, and ours would bring nothing."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    model = AsyncEngineArgs(**arguments).create_model_config()
    if model.is_hybrid and CAN_FAIL and not any(arguments.get(name) for name in _WITHOUT_STATES):
        return connector | {"kv_connector": "StatesConnector"}, ""
    if model.is_hybrid or model.is_attention_free:
        return None, "it keeps a state instead of KV"
    text = model.hf_text_config.to_dict()  # attributes that differ by layer raise
    shapes = text.get("per_layer_config") or text.get("global_head_dim")
    if shapes and sharing_layers(text):  # in one group, vLLM looks for shapes of theirs where there are none
        if not CAN_FAIL:
            return None, "its layers share KV of several shapes"
        return connector | {"kv_connector": "GroupsConnector"}, ""
    return connector | ({} if CAN_FAIL else {"kv_connector": "BlendConnector"}), ""


def server_options(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments that vLLM's server reads from its command line, by name, and the words that it
    cannot use. Raises ConfigError for a value that it refuses."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from blendrag.engine.compat.serve import make_arg_parser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ConfigError(message)

    options, left = make_arg_parser(Parser()).parse_known_args(list(words))
    return vars(options), left


class MemoryPlan(NamedTuple):
    """The memory that an engine may take, in bytes.

    device: all there is. share: the part of it for weights and KV together. cache: for KV, if that is given.
    window: tokens of the longest prompt. prompt: what vLLM keeps of its KV.
    """

    device: int
    share: int
    cache: int | None
    window: int
    prompt: int


def memory_plan(arguments: dict[str, Any]) -> MemoryPlan:
    """Return the memory plan of an engine with these arguments. Raises vLLM's error where they are wrong."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    config = AsyncEngineArgs(**arguments).create_engine_config()
    model, cache = config.model_config, config.cache_config
    numbers = model.get_head_size()  # of a token in a layer
    numbers *= 1 if model.use_mla else 2 * model.get_num_kv_heads(config.parallel_config)
    device = int(current_platform.get_device_total_memory())
    share = int(device * cache.gpu_memory_utilization)
    bytes_each = 1 if cache.cache_dtype not in PLAIN_KV else model.dtype.itemsize
    prompt = numbers * bytes_each * _kept_tokens(config)
    return MemoryPlan(device, share, cache.kv_cache_memory_bytes, model.max_model_len, prompt)


def _kept_tokens(config: VllmConfig) -> int:
    """Return of how many tokens KV is kept of the longest prompt, summed over layers."""
    model, steps = config.model_config, config.scheduler_config
    layers, longest = model.get_num_layers(config.parallel_config), model.max_model_len
    layers -= sharing_layers(model.hf_text_config.to_dict())
    window: int | None = getattr(model.hf_text_config, "sliding_window", None)
    if not window or steps.disable_hybrid_kv_cache_manager:
        return layers * longest
    full = (getattr(model.hf_text_config, "layer_types", None) or [])[:layers].count("full_attention")
    return full * longest + (layers - full) * min(longest, window + steps.max_num_batched_tokens)


def engine_processes() -> list[BaseProcess]:
    """Return the processes that ``AsyncLLM``s of this one have started; workers are children of theirs."""
    return [child for child in multiprocessing.active_children() if child.name.startswith("EngineCore")]
