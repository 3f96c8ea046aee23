"""vLLM's attention backends for GPUs, without one. Modules, builders, metadata and layouts of the cache are
vLLM's. So are Triton's kernels, where its interpreter runs them; else exact ones of plain torch take their
place, and FlashAttention's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import triton_utils
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.platforms import current_platform
from vllm.utils.math_utils import round_up
from vllm.v1.attention import selector
from vllm.v1.attention.backends import flash_attn, triton_attn
from vllm.v1.attention.ops import (
    triton_attention_helpers,
    triton_reshape_and_cache_flash,
    triton_unified_attention,
)
from vllm.v1.kv_cache_interface import (
    KVCacheLayout,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
)

from blendrag.attention.runs import dense_attention
from blendrag.attention.scores import Scores
from blendrag.engine.compat import head_attention
from blendrag.engine.forward.prompt_forward import LoadedModel
from device import INTERPRETED
from small_decoder import BLOCKS, small_model
from stand_in_device import DeviceTensor

REQUESTS = 4  # of a step at most


def model_with(
    backend: str,
    layout: KVCacheLayout,
    folder: Path,
    layers: int,
    patched: pytest.MonkeyPatch,
    put: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> LoadedModel:
    """A small model as the worker of an engine with full CUDA graphs has it, which was started to evict, when
    vLLM has not yet heard that the backend cannot be captured. ``patched`` outlives it."""
    ({"FLASH_ATTN": _flash_attention, "TRITON_ATTN": _triton}[backend])(patched)
    path = f"{head_attention.__name__}.{backend}"
    patched.setattr(type(current_platform), "get_attn_backend_cls", lambda *_, **__: path)
    patched.setattr(head_attention, "started_to_evict", lambda: True)
    patched.setattr(VllmConfig, "__post_init__", _with_graphs(VllmConfig.__post_init__))
    selector._cached_get_attn_backend.cache_clear()
    model = small_model(folder, layers, put, block_size=16)
    selector._cached_get_attn_backend.cache_clear()
    _lay_out(model, layout, put)
    return model


def _with_graphs(configure: Any) -> Any:
    def configured(config: VllmConfig) -> None:
        configure(config)
        config.scheduler_config.max_num_seqs = REQUESTS
        config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
        config.compilation_config.cudagraph_capture_sizes = [1, 2, 3]  # up to 3 requests' keys are divided
        config.compilation_config.max_cudagraph_capture_size = REQUESTS

    return configured


def _lay_out(model: LoadedModel, layout: KVCacheLayout, put: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """All layers' caches in one allocation, as vLLM lays them out."""
    attentions, spec = model.decoder.attentions, model.cache.runner.attn_groups[0][0].kv_cache_spec
    layers, blocks, *_ = compute_layout_strides(spec, BLOCKS, len(attentions), layout)
    memory = torch.zeros(len(attentions) * BLOCKS * spec.page_size_bytes, dtype=torch.int8)
    placed = KVCacheTensor(memory.numel(), [each.layer_name for each in attentions], layers, blocks)
    views = create_kv_cache_views(memory, spec, BLOCKS, layout, placed)
    for attention, cache in zip(attentions, views, strict=True):
        attention.kv_cache = put(cache)


def _held(tensor: torch.Tensor) -> torch.Tensor:
    """What a kernel finds: on the device that is none, too."""
    return tensor.held if isinstance(tensor, DeviceTensor) else tensor


def _write(key: Any, value: Any, key_cache: Any, value_cache: Any, slots: torch.Tensor, *_: Any) -> None:
    size, slots = key_cache.shape[1], _held(slots)
    for cache, tensor in ((key_cache, key), (value_cache, value)):
        _held(cache)[slots // size, slots % size] = _held(tensor)[: len(slots)]


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    block_table: torch.Tensor,
    k_descale: torch.Tensor,
    v_descale: torch.Tensor,
    **_: Any,
) -> None:
    """What both kernels do, and what they count on."""
    assert causal and block_table.dtype == seqused_k.dtype == cu_seqlens_q.dtype == torch.int32
    assert k_descale.shape == v_descale.shape == (len(seqused_k), k.shape[2])
    if k.shape[2] == 1:  # else the table is a test's, and vLLM's own ends behind a tile
        assert block_table.shape[1] * k.shape[1] % 128 == 0, "a tile ends past the table"
    q, k, v, out, cu_seqlens_q, seqused_k, block_table = map(
        _held, (q, k, v, out, cu_seqlens_q, seqused_k, block_table)
    )
    for line, length in enumerate(seqused_k.tolist()):
        rows = slice(*cu_seqlens_q[line : line + 2].tolist())
        count = rows.stop - rows.start
        assert count <= max_seqlen_q and count <= length <= max_seqlen_k
        key, value = (cache[block_table[line].long()].flatten(0, 1)[:length] for cache in (k, v))
        out[rows] = dense_attention(
            q[rows], key, value, torch.arange(length - count, length), Scores(softmax_scale)
        )


def _flash_attention(patched: pytest.MonkeyPatch) -> None:
    """As with FlashAttention 3, which plans a step's work beforehand."""

    def plan(batch_size: int, num_heads_q: int, num_heads_kv: int, cache_seqlens: Any, **_: Any) -> Any:
        facts = [batch_size, num_heads_q, num_heads_kv, int(cache_seqlens.sum())]
        return torch.tensor((facts * (batch_size + 4))[: 1 + round_up(batch_size, 4) * 4], dtype=torch.int32)

    def attend(q: Any, k: Any, seqused_k: Any, scheduler_metadata: Any, **other: Any) -> None:
        assert scheduler_metadata.equal(plan(len(seqused_k), q.shape[1], k.shape[2], seqused_k)), (
            "planned otherwise"
        )
        _attend(q, k, seqused_k=seqused_k, **other)

    kernels = {
        "flash_attn_varlen_func": attend,
        "get_scheduler_metadata": plan,
        "reshape_and_cache_flash": _write,
    }
    for name, kernel in kernels.items():
        patched.setattr(flash_attn, name, kernel, raising=False)
    patched.setattr(flash_attn, "get_flash_attn_version", lambda **_: 3)
    patched.setattr(flash_attn, "flash_attn_supports_quant_query_input", lambda: False)


def _triton(patched: pytest.MonkeyPatch) -> None:
    attend, write = _attend, _write
    if INTERPRETED:
        import triton
        import triton.language as tl

        for name, made in {"triton": triton, "tl": tl, "HAS_TRITON": True}.items():
            patched.setattr(triton_utils, name, made)
        importlib.reload(triton_attention_helpers)
        attend = importlib.reload(triton_unified_attention).unified_attention
        write = importlib.reload(triton_reshape_and_cache_flash).triton_reshape_and_cache_flash
        patched.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))

    def checked(q: Any, seqused_k: Any, seq_threshold_3D: int, **other: Any) -> None:
        if other["max_seqlen_q"] == 1 and len(seqused_k) <= seq_threshold_3D:  # else they are not used
            parts = prod(q.shape[:2]) * other["num_par_softmax_segments"]
            assert parts <= other["softmax_segm_max"].numel() == other["softmax_segm_expsum"].numel()
            assert parts * q.shape[2] <= other["softmax_segm_output"].numel()
        attend(q=q, seqused_k=seqused_k, seq_threshold_3D=seq_threshold_3D, **other)

    patched.setattr(triton_attn, "unified_attention", checked)
    patched.setattr(triton_attn, "triton_reshape_and_cache_flash", write)
