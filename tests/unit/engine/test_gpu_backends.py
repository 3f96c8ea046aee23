"""Eviction where the engine computes on a GPU: vLLM's backends for them, without one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
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

from blendrag.engine.compat import head_attention
from device import INTERPRETED
from evictions import LAYERS, evict_and_read
from gpu_backends import model_with

BACKENDS = ["FLASH_ATTN", "TRITON_ATTN"]


@pytest.mark.parametrize("layout", KVCacheLayout)
@pytest.mark.parametrize("backend", BACKENDS[INTERPRETED:])
def test_what_is_read_after_eviction_is_not_what_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, layout: KVCacheLayout
) -> None:
    model = model_with(backend, layout, tmp_path / "model", LAYERS, monkeypatch)
    evict_and_read(model, monkeypatch, kv_allocator="joint")


def started(**options: Any) -> VllmConfig:
    config = VllmConfig()
    config.kv_transfer_config = KVTransferConfig(kv_connector="a", kv_role="kv_both", **options)
    return config


@pytest.mark.parametrize("backend", BACKENDS)
def test_engine_without_a_budget_has_other_backends_than_vllms(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
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
            assert issubclass(
                evicting.get_impl_cls(), (head_attention.HeadAttentionImpl, stock.get_impl_cls())
            )
    finally:
        for one in BACKENDS:
            AttentionBackendEnum[one].clear_override()


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_of_an_engine_that_evicts_is_captured_in_a_graph(backend: str) -> None:
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


def test_layers_of_another_backend_are_taken_for_ones_that_read_by_heads() -> None:
    def layer(name: str) -> Any:
        return SimpleNamespace(impl=object(), attn_backend=SimpleNamespace(get_name=lambda: name))

    assert head_attention.not_by_heads([layer("FLASHINFER")]) == "backend FLASHINFER does not read by heads"
    assert head_attention.not_by_heads([layer("FLASH_ATTN")]) == "the engine was started without kv_budget"
