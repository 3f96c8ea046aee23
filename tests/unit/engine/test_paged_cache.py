"""How rows find their K and V where a kernel of ours reads the cache: vLLM's own modules and layouts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention.attention import Attention
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheLayout,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
)

from blendrag.attention.runs import dense_attention
from blendrag.engine.compat.groups import LayerGroup
from blendrag.engine.compat.layer_kv import LayerKV
from blendrag.engine.compat.model import key_value_of, scores_of
from blendrag.engine.forward.paged import PagedCache, Pages
from blendrag.engine.worker.selfcheck import mask_error
from device import needs_interpreter

HEADS, KV_HEADS, SIZE, BLOCK_SIZE, BLOCKS = 4, 2, 16, 8, 12
GPU_BACKENDS = [FlashAttentionBackend, TritonAttentionBackend]


def module(backend: type[AttentionBackend], kind: type[Attention] = Attention, **options: Any) -> Attention:
    """One of vLLM's attention modules, as a model on a GPU has it."""
    with set_current_vllm_config(VllmConfig()):
        return kind(HEADS, SIZE, 0.25, KV_HEADS, attn_backend=backend, prefix="layer", **options)


def caches(layout: KVCacheLayout, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Those of two layers, in one piece of memory, as vLLM lays them out."""
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=dtype)
    layers, blocks, *_ = compute_layout_strides(spec, BLOCKS, 2, layout)
    memory = torch.zeros(2 * BLOCKS * spec.page_size_bytes, dtype=torch.int8)
    placed = KVCacheTensor(memory.numel(), ["a", "b"], layers, blocks)
    return create_kv_cache_views(memory, spec, BLOCKS, layout, placed)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_window_cap_and_sinks_of_a_layer_are_kept(backend: type[AttentionBackend]) -> None:
    plain = scores_of(module(backend))
    assert plain is not None and plain.bare
    assert (plain.scale, plain.window) == (0.25, None)
    other = scores_of(module(backend, per_layer_sliding_window=9, logits_soft_cap=30.0))
    assert other is not None and not other.bare
    assert (other.scale, other.window, other.soft_cap, other.sinks) == (0.25, 9, 30.0, None)
    sinks = torch.randn(HEADS)
    of_sinks = scores_of(module(TritonAttentionBackend, sinks=sinks))
    assert of_sinks is not None and not of_sinks.bare and of_sinks.sinks is sinks


def test_attention_that_sees_other_keys_is_not_taken_for_plain() -> None:
    class ChunkedAttention(Attention):
        pass

    assert scores_of(module(TritonAttentionBackend, ChunkedAttention)) is None
    assert scores_of(module(TritonAttentionBackend, alibi_slopes=[0.5] * HEADS)) is None


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize("layout", KVCacheLayout)
def test_each_token_finds_its_own_key(layout: KVCacheLayout, backend: type[AttentionBackend]) -> None:
    first, second = caches(layout)
    attention = module(backend)
    for cache in (first, second):
        found = key_value_of(attention, cache)
        assert found is not None
        for part, view in enumerate(found):
            assert view.shape == (BLOCKS, BLOCK_SIZE, KV_HEADS, SIZE) and view.stride(3) == 1
            numbers = torch.arange(view.numel(), dtype=torch.float32).view(view.shape)
            view.copy_(numbers)
            assert cache[7, 1, 3, part * SIZE :][:SIZE].equal(numbers[7, 3, 1])
    assert second[7, 1, 3].equal(first[7, 1, 3]), "the layers overlap"


@pytest.mark.parametrize(
    ("backend", "cache"),
    [
        (CPUAttentionBackend, caches(KVCacheLayout.LBHNC)[0]),  # K of a block in an order of the processor's
        (FlashAttentionBackend, caches(KVCacheLayout.LBHNC, torch.uint8)[0]),  # fp8
        (FlashAttentionBackend, torch.zeros(2, BLOCKS, BLOCK_SIZE, KV_HEADS, SIZE)),
        (FlashAttentionBackend, torch.zeros(BLOCKS, 2, BLOCK_SIZE, KV_HEADS, SIZE)),
    ],
)
def test_layout_that_is_not_known_is_not_read(backend: type[AttentionBackend], cache: torch.Tensor) -> None:
    attention = module(TritonAttentionBackend)
    attention.attn_backend = backend
    assert key_value_of(attention, cache) is None


@pytest.fixture
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU. No CPU build of vLLM has the backends' kernel that writes."""

    def write(
        _: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        views = key_value_of(module(TritonAttentionBackend), cache)
        assert views is not None
        for view, tensor in zip(views, (key, value), strict=True):
            view[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = tensor

    monkeypatch.setattr(PagedCache, "by_kernel", True)
    monkeypatch.setattr(LayerKV, "write", write)


@needs_interpreter
@pytest.mark.usefixtures("by_kernel")
@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.BLHNC])
@pytest.mark.parametrize("lengths", [[30], [5, 17, 8]])
def test_rows_attend_to_their_own_sequence_and_place(layout: KVCacheLayout, lengths: list[int]) -> None:
    attention = module(TritonAttentionBackend, per_layer_sliding_window=11)
    attention.kv_cache = caches(layout)[1]
    cache = PagedCache([attention], None, [LayerGroup(BLOCK_SIZE)])
    pages = cache.pages([9, 2, 4, 0]) if len(lengths) == 1 else cache.scratch(lengths)
    generator = torch.Generator().manual_seed(len(lengths))
    whole = [torch.randn(2, length, KV_HEADS, SIZE, generator=generator) for length in lengths]
    for number, key_value in enumerate(whole):
        pages.write(0, pages.places(np.arange(lengths[number]), number), *key_value)
    at = [np.arange(length)[:: 2 + number] for number, length in enumerate(lengths)]
    positions = np.concatenate(at)
    sequences = np.concatenate([np.full_like(each, number) for number, each in enumerate(at)])
    query = torch.randn(positions.size, HEADS, SIZE, generator=generator)
    addresses = pages.addresses(positions, sequences if len(lengths) > 1 else 0)
    found = pages.attend(0, query, addresses)
    scores = scores_of(attention)
    assert scores is not None
    for number, (key, value) in enumerate(whole):
        own = torch.from_numpy(sequences == number)
        expected = dense_attention(query[own], key, value, torch.from_numpy(at[number]), scores)
        torch.testing.assert_close(found[own], expected, rtol=1e-4, atol=1e-5)


@needs_interpreter
@pytest.mark.usefixtures("by_kernel")
@pytest.mark.parametrize("wrong", range(3))
def test_wrong_mask_in_one_kind_of_layer_fails_the_self_check(
    wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[dict[str, Any]] = [{}, {"per_layer_sliding_window": 9}, {"sinks": torch.zeros(HEADS)}]
    layers = [module(TritonAttentionBackend, **options) for options in kinds]
    for layer in layers:
        layer.kv_cache = caches(KVCacheLayout.LBNHC)[0]
    model = torch.nn.Linear(1, 1)  # the probe is of its type
    decoder: Any = SimpleNamespace(model=model)
    cache = PagedCache(layers, None, [LayerGroup(BLOCK_SIZE)])
    assert mask_error(decoder, cache, tokens=80, share=0.3) < 1e-5
    attend = Pages.attend

    def shifted(pages: Pages, layer: int, query: torch.Tensor, addresses: Any) -> torch.Tensor:
        if layer == wrong:
            addresses = [replace(each, positions=(each.positions - 1).clamp_min(0)) for each in addresses]
        return attend(pages, layer, query, addresses)

    monkeypatch.setattr(Pages, "attend", shifted)
    assert mask_error(decoder, cache, tokens=80, share=0.3) > 0.1
