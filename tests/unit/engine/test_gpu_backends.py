"""Eviction where the engine computes on a GPU: vLLM's backends for them, without one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import (
    CompilationConfig,
    CompilationMode,
    CUDAGraphMode,
    KVTransferConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheLayout

from blendrag.engine.budget.compression import Compression
from blendrag.engine.compat import head_attention
from device import INTERPRETED
from evictions import LAYERS, Request, evict_and_read, outputs
from gpu_backends import model_with
from stand_in_device import DeviceTensor, stand_in

BACKENDS = ["FLASH_ATTN", "TRITON_ATTN"]
LAYOUTS = list(KVCacheLayout)


@pytest.mark.parametrize("layout", LAYOUTS[:: 2 if INTERPRETED else 1])
@pytest.mark.parametrize("backend", BACKENDS[INTERPRETED:])
def test_what_is_read_after_eviction_is_what_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, layout: KVCacheLayout
) -> None:
    model = model_with(backend, layout, tmp_path / "model", LAYERS, monkeypatch)
    evict_and_read(model, monkeypatch, ":ada_pyramid")


@torch.inference_mode()
def test_host_waits_for_the_device_a_few_times_whatever_the_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an eviction, and of a step that reads what it left."""
    monkeypatch.setattr("gpu_backends.INTERPRETED", False)
    waits = []
    for layers in (2, 4):
        with stand_in(monkeypatch) as crossings:
            folder = tmp_path / str(layers)
            model = model_with("TRITON_ATTN", KVCacheLayout.LBHNC, folder, layers, monkeypatch, DeviceTensor)
            compression = Compression(model.decoder, model.cache)
            assert compression.reason is None
            request = Request(model, "a", 117, list(range(8)), kv_budget=64)
            request.blended(compression, DeviceTensor)
            crossings.forget()
            assert compression.evict(request.order()).freed
            waits.append(list(crossings.waits))
            crossings.forget()
            outputs(model, [request, request], [1, 3], DeviceTensor)
            waits.append(list(crossings.waits))
    assert [len(each) for each in waits] == [1, 3, 1, 3], waits


def started(**options: Any) -> VllmConfig:
    config = VllmConfig()
    config.kv_transfer_config = KVTransferConfig(kv_connector="a", kv_role="kv_both", **options)
    return config


@pytest.mark.parametrize("backend", BACKENDS)
def test_engine_without_a_budget_has_vllms_backends(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    named = AttentionBackendEnum[backend]
    stock = named.get_class()
    monkeypatch.setattr(head_attention, "is_cpu", lambda: False)
    head_attention.register()
    try:
        with set_current_vllm_config(started(kv_connector_extra_config={"evicts": False})):
            assert named.get_class() is stock
        with set_current_vllm_config(started(kv_connector_extra_config={"evicts": True})):
            evicting = named.get_class()
            assert evicting is not stock and issubclass(evicting, stock)
            assert evicting.full_cls_name() == tuple(named.get_path().rsplit(".", 1)), (
                "vLLM finds it by its name"
            )
            looking = evicting.get_impl_cls()
            assert issubclass(looking, head_attention.HeadAttentionImpl)
            assert issubclass(looking, stock.get_impl_cls())
        assert named.get_class() is stock
    finally:
        for one in BACKENDS:
            AttentionBackendEnum[one].clear_override()


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_of_an_engine_that_evicts_stays_out_of_full_graphs(backend: str) -> None:
    with set_current_vllm_config(started(kv_connector_extra_config={"evicts": True})):
        builder = getattr(head_attention, backend).get_builder_cls()
    config = VllmConfig()
    support = builder.get_cudagraph_support(config, None)
    for wanted in (CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY):
        compiled = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=wanted)
        compiled.splitting_ops = list(CompilationConfig._attention_ops)
        found = compiled.resolve_cudagraph_mode_and_sizes(support, backend)
        assert found == CUDAGraphMode.PIECEWISE
    with pytest.raises(ValueError, match="try cudagraph_mode=PIECEWISE"):
        CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL).resolve_cudagraph_mode_and_sizes(
            support, backend
        )


def test_layers_of_another_backend_are_not_taken_for_ones_that_read_by_heads() -> None:
    def layer(name: str) -> Any:
        return SimpleNamespace(impl=object(), attn_backend=SimpleNamespace(get_name=lambda: name))

    assert head_attention.not_by_heads([layer("FLASHINFER")]) == "backend FLASHINFER does not read by heads"
    assert head_attention.not_by_heads([layer("FLASH_ATTN")]) == "the engine was started without kv_budget"
