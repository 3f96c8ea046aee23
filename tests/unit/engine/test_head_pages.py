"""Pages of one head each in vLLM's cache, and its CPU kernels over them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm import _custom_ops as ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata, _get_attn_isa
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheLayout,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
)

from blendrag.engine.budget.head_pages import HeadPages, KeptPages, PageReader

LAYERS, BLOCKS, KV_HEADS, GROUP, BLOCK, SIZE = 3, 24, 2, 3, 32, 64
HEADS = KV_HEADS * GROUP


def modules(layout: KVCacheLayout = KVCacheLayout.LBHNC, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Attention modules of a CPU's engine, their caches in one allocation as vLLM lays them out."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=dtype)
    layers, blocks, *_ = compute_layout_strides(spec, BLOCKS, LAYERS, layout)
    memory = torch.zeros(LAYERS * BLOCKS * spec.page_size_bytes, dtype=torch.int8)
    placed = KVCacheTensor(memory.numel(), [str(n) for n in range(LAYERS)], layers, blocks)
    isa = _get_attn_isa(dtype, BLOCK, SIZE)
    config = VllmConfig()
    config.model_config = SimpleNamespace(dtype=dtype)  # type: ignore[assignment]  # all that is asked for
    with set_current_vllm_config(config):
        impl = CPUAttentionBackendImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS, None, None, "auto")
    scales = {"_k_scale_float": 1.0, "_v_scale_float": 1.0}
    shape = {"num_kv_heads": KV_HEADS, "head_size": SIZE}
    views = create_kv_cache_views(memory, spec, BLOCKS, layout, placed)
    return [SimpleNamespace(impl=impl, isa=isa, kv_cache=cache, **scales, **shape) for cache in views]


def attend(
    attention: Any, query: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """The kernel, for one query at the end of each sequence: [sequences, heads, SIZE]; same shape."""
    count, kv_heads = len(lengths), cache.shape[1]
    start = torch.arange(count + 1, dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=count,
        num_heads=query.shape[1],
        num_kv_heads=kv_heads,
        head_dim=SIZE,
        seq_lens=lengths,
        dtype=query.dtype,
        query_start_loc=start,
        causal=True,
        sliding_window_size=-1,
        isa=attention.isa,
        enable_kv_split=True,
    )
    slots = torch.zeros(count, dtype=torch.int64)
    metadata = CPUAttentionMetadata(
        count, 1, start, int(lengths.max()), lengths, table, slots, scheduler_metadata=plan
    )
    out = torch.empty_like(query)
    attention.impl.forward(attention, query, query, query, cache, metadata, out)
    return out


def assert_each_has_one_owner(kept: KeptPages, pages: HeadPages) -> None:
    lines = kept.table.reshape(-1, kept.table.shape[2])
    owned = np.concatenate([line[:n] for line, n in zip(lines, kept.counts.ravel(), strict=True)])
    layers, heads = np.arange(pages.num_layers)[:, None, None], np.arange(pages.kv_heads)[:, None]
    assert np.array_equal(np.sort(owned), np.sort(pages.ids(layers, kept.blocks, heads).ravel()))


def reader_of(pages: HeadPages) -> PageReader:
    scratch = torch.zeros(1, 1, BLOCK, 2 * SIZE, dtype=pages.view.dtype)
    reader = PageReader.of(pages, scratch)
    assert reader is not None
    return reader


@pytest.mark.parametrize("layout", KVCacheLayout)
def test_page_is_its_own_layers_block_and_head(layout: KVCacheLayout) -> None:
    found = modules(layout)
    pages = HeadPages.of(found)
    assert pages is not None
    for layer, attention in enumerate(found):
        cache = attention.kv_cache
        cache.copy_(torch.rand(cache.shape))
        for block in (0, 7, BLOCKS - 1):
            for head in range(KV_HEADS):
                page = pages.view[pages.ids(layer, np.array(block), head)]
                assert page[0].equal(cache[block, head])
                assert page.data_ptr() == cache[block, head].data_ptr()


def test_layers_apart_and_caches_of_another_shape_are_no_pages() -> None:
    found = modules()
    found[1].kv_cache = found[1].kv_cache.clone()
    assert HeadPages.of(found) is None
    older = modules()
    for attention in older:  # before vLLM 0.26
        attention.kv_cache = attention.kv_cache.view(BLOCKS, KV_HEADS, 2, BLOCK, SIZE)
    assert HeadPages.of(older) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_read_of_a_page_is_what_was_written(dtype: torch.dtype) -> None:
    found = modules(dtype=dtype)
    pages = HeadPages.of(found)
    assert pages is not None
    key, value = torch.randn(2, 2 * BLOCK, SIZE).to(dtype)
    ids = pages.ids(1, np.array([5, 2]), 1)
    pages.write(1, ids, key, value)
    reader, rows = reader_of(pages), torch.tensor([3, 40, 63])
    assert reader.whole(0, ids).equal(key) and reader.whole(1, ids[1:]).equal(value[BLOCK:])
    for read, written in zip(reader.rows(ids, rows), (key, value), strict=True):
        assert read.equal(written[rows])


AMX = pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this processor has no AMX kernels")


@pytest.mark.parametrize("isa", ["vec", "vec16", pytest.param("amx", marks=AMX)])
def test_order_of_a_processors_pages_is_learnt(isa: str) -> None:
    found = modules(dtype=torch.bfloat16)
    for attention in found:
        attention.isa = isa
    pages = HeadPages.of(found)
    assert pages is not None
    key, value = torch.randn(2, BLOCK, SIZE).bfloat16()
    ids = pages.ids(2, np.array([9]), 0)
    pages.write(2, ids, key, value)
    assert reader_of(pages).whole(0, ids).equal(key) and reader_of(pages).whole(1, ids).equal(value)


def test_backend_that_changes_numbers_is_not_read() -> None:
    found = modules()
    pages = HeadPages.of(found)
    assert pages is not None
    stock = found[0].impl

    class Doubling:
        @staticmethod
        def do_kv_cache_update(layer: Any, key: torch.Tensor, value: torch.Tensor, *where: Any) -> None:
            stock.do_kv_cache_update(layer, key * 2, value, *where)

    found[0].impl = Doubling
    assert PageReader.of(pages, torch.zeros(1, 1, BLOCK, 2 * SIZE)) is None


@given(st.integers(1, 6), st.integers(0, 1000))
def test_page_has_one_owner(kept: int, seed: int) -> None:
    pages = HeadPages.of(modules())
    assert pages is not None
    heads = LAYERS * KV_HEADS
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(kept * heads, rng.dirichlet(np.ones(heads))).reshape(LAYERS, KV_HEADS)
    blocks = rng.permutation(BLOCKS)[:kept]
    found = KeptPages.of(pages, blocks, counts)
    assert_each_has_one_owner(found, pages)
    largest = np.unravel_index(found.counts.argmax(), found.counts.shape)
    page = pages.ids(0, blocks[:1], 0)[0]  # somebody's, once or twice then
    found.table[largest][0] = page if found.table[largest][0] != page else page + BLOCKS
    with pytest.raises(AssertionError):
        assert_each_has_one_owner(found, pages)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [33, 200, 320])
def test_rows_that_are_shuffled_over_all_pages_change_no_output(length: int, dtype: torch.dtype) -> None:
    """Nothing is dropped: softmax does not ask in which order keys come."""
    torch.manual_seed(length)
    found = modules(dtype=dtype)
    pages = HeadPages.of(found)
    assert pages is not None
    blocks = torch.randperm(BLOCKS)[: -(-length // BLOCK)].numpy()
    table, lengths = torch.from_numpy(blocks)[None].int(), torch.tensor([length], dtype=torch.int32)
    slots = torch.tensor([blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(length)])
    key, value = torch.randn(2, LAYERS, length, KV_HEADS, SIZE).to(dtype)
    query = torch.randn(LAYERS, 1, HEADS, SIZE).to(dtype)
    before = []
    for attention, *kv, asked in zip(found, key, value, query, strict=True):
        attention.impl.do_kv_cache_update(attention, *kv, attention.kv_cache, slots)  # as the engine does
        before.append(attend(attention, asked, attention.kv_cache, table, lengths))
    first = (length - 1) // BLOCK
    kept = KeptPages.of(pages, blocks[:first], np.full((LAYERS, KV_HEADS), first))
    shuffled = kept.table.reshape(-1)[torch.randperm(kept.table.size).numpy()].reshape(kept.table.shape)
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            order = torch.randperm(first * BLOCK)
            pages.write(layer, shuffled[layer, head], key[layer, order, head], value[layer, order, head])
    own = np.arange(KV_HEADS)[:, None]
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.01}
    for layer, attention in enumerate(found):
        of_heads = np.concatenate([shuffled[layer], pages.ids(layer, blocks[first:], own)], 1)
        by_heads = query[layer].view(KV_HEADS, GROUP, SIZE)
        table = torch.from_numpy(of_heads).int()
        after = attend(attention, by_heads, pages.view, table, lengths.repeat(KV_HEADS))
        torch.testing.assert_close(after.view(1, HEADS, SIZE), before[layer], **tolerance)
