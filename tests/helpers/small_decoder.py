"""A small model with random weights in vLLM's own modules, without an engine: of any depth, in a second."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.worker.utils import AttentionGroup

from blendrag.engine.compat.groups import groups_of_runner
from blendrag.engine.forward.decoders import make_decoder
from blendrag.engine.forward.paged import PagedCache
from blendrag.engine.forward.prompt_forward import LoadedModel
from blendrag.engine.worker.selfcheck import join_drafts

CPU = torch.device("cpu")
KV_HEADS, SIZE, VOCABULARY, BLOCKS = 2, 32, 50_000, 32
WINDOW = 48  # tokens
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


def small_model(
    folder: Path,
    layers: int,
    put: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    block_size: int | None = None,
    windowed: Sequence[bool] = (),
    drafts: str = "",
    dtype: torch.dtype = torch.float32,
) -> LoadedModel:
    """As a worker has it, with an empty paged cache. The same weights every time. put: moves what
    the model keeps to where it is. block_size: None: that of engines on CPUs. windowed:
    which layers have a window; they are a group of their own, as vLLM has it. drafts: the method of a model
    of two layers that drafts; "itself": the model drafts for itself."""
    folder.mkdir(parents=True, exist_ok=True)
    shape: dict[str, Any] = {"num_hidden_layers": layers}
    if windowed:
        kinds = ["sliding_attention" if each else "full_attention" for each in windowed]
        shape |= {"sliding_window": WINDOW, "layer_types": kinds}
    (folder / "config.json").write_text(json.dumps(_CONFIG | shape))
    speculative: dict[str, Any] = {}
    if drafts:
        (drafting := folder / "drafts").mkdir(exist_ok=True)
        own, method = (shape, "draft_model") if drafts == "itself" else ({"num_hidden_layers": 2}, drafts)
        (drafting / "config.json").write_text(json.dumps(_CONFIG | own))
        spoken = {"method": method, "model": str(drafting), "num_speculative_tokens": 2}
        speculative["speculative_config"] = spoken
    config = EngineArgs(
        model=str(folder),
        dtype=str(dtype).removeprefix("torch."),
        enforce_eager=True,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=1,
        **speculative,
    ).create_engine_config()
    config.cache_config.block_size = block_size or config.cache_config.block_size
    with set_current_vllm_config(config), set_default_torch_dtype(dtype):
        _be_alone()
        with patch.dict(rotary_embedding._ROPE_DICT, clear=True):  # shared, and others are moved
            model, drafter = initialize_model(config), None
            if drafts:
                of_drafts = config.speculative_config.draft_model_config
                drafter = initialize_model(config, prefix="drafts", model_config=of_drafts)
        if drafts == "eagle3":
            model.set_aux_hidden_state_layers((1, layers // 2, layers))
        generator = torch.Generator().manual_seed(0)
        for one in filter(None, (model, drafter)):
            for _, weights in sorted(one.named_parameters()):
                noise = torch.randn(weights.shape, generator=generator, dtype=torch.float32)
                weights.data = (0.15 * noise if weights.dim() > 1 else 1 + 0.1 * noise).to(dtype)
            if drafts == "itself":
                generator.manual_seed(0)
            for module in one.modules():
                for kept in (module._parameters, module._buffers):
                    kept.update({name: put(each.detach()) for name, each in kept.items() if each is not None})
            process_weights_after_loading(one.eval(), config.model_config, CPU)
        decoder = make_decoder(model, config)
        size = config.cache_config.block_size
        groups: dict[type[KVCacheSpec], AttentionGroup] = {}
        for attention in config.compilation_config.static_forward_context.values():
            attention.kv_cache = put(torch.zeros(BLOCKS, KV_HEADS, size, 2 * SIZE, dtype=dtype))
            spec = attention.get_kv_cache_spec(config)
            group = groups.setdefault(type(spec), AttentionGroup(attention.attn_backend, [], spec, 0))
            group.layer_names.append(attention.layer_name)
        for group in groups.values():
            group.create_metadata_builders(config, CPU)
    runner: Any = SimpleNamespace(
        attn_groups=[[group] for group in groups.values()],
        vllm_config=config,
        get_model=lambda: model,
        get_draft_model=lambda: drafter,
    )
    with torch.inference_mode():
        cache = PagedCache(decoder.attentions, runner, groups_of_runner(runner))
        drafting, cache = join_drafts(decoder, cache)
    return LoadedModel(decoder, cache, drafts=drafting)


def _be_alone() -> None:
    """The only one of a group of workers, which vLLM's layers ask for."""
    if not parallel_state.model_parallel_is_initialized():
        meeting = Path(tempfile.mkdtemp()) / "meeting"
        parallel_state.init_distributed_environment(1, 0, meeting.as_uri(), 0, "gloo")
        parallel_state.initialize_model_parallel()
