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
    assert reader.keys(ids).equal(key) and reader.values(ids[1:]).equal(value[BLOCK:])
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
    assert reader_of(pages).keys(ids).equal(key) and reader_of(pages).values(ids).equal(value)


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


class Prompt:
    """A request's K and V in an engine's cache, and one query for each layer at each of its lengths."""

    def __init__(self, length: int, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(length)
        self.modules, self.length = modules(dtype=dtype), length
        found = HeadPages.of(self.modules)
        assert found is not None
        self.pages = found
        self.blocks = torch.randperm(BLOCKS)[: -(-length // BLOCK)].tolist()
        self.key, self.value = torch.randn(2, LAYERS, length, KV_HEADS, SIZE).to(dtype)
        for layer in range(LAYERS):
            self.write(layer, self.key[layer], self.value[layer], 0)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, at: int) -> None:
        """As the engine does: by the request's blocks."""
        slots = torch.tensor([self.blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(at, at + len(key))])
        attention = self.modules[layer]
        attention.impl.do_kv_cache_update(attention, key, value, attention.kv_cache, slots)

    def stock(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        attention = self.modules[layer]
        table = torch.tensor([self.blocks], dtype=torch.int32)
        length = torch.tensor([self.length], dtype=torch.int32)
        return attend(attention, query, attention.kv_cache, table, length)

    def by_heads(self, layer: int, query: torch.Tensor, kept: KeptPages, first: int) -> torch.Tensor:
        """Over what is kept of the blocks before ``first``, and the head's own page of every later one."""
        tables, lengths = [], []
        for head in range(KV_HEADS):
            own = kept.table[layer, head, : kept.counts[layer, head]]
            later = self.pages.ids(layer, np.array(self.blocks[first:]), head)
            tables.append(torch.from_numpy(np.concatenate([own, later])).int())
            lengths.append(len(own) * BLOCK + self.length - first * BLOCK)
        table = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
        rows = query.view(KV_HEADS, GROUP, SIZE)
        found = attend(
            self.modules[layer], rows, self.pages.view, table, torch.tensor(lengths, dtype=torch.int32)
        )
        return found.view(query.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [33, 200, 320])
def test_rows_that_are_shuffled_over_all_pages_change_no_output(length: int, dtype: torch.dtype) -> None:
    """Nothing is dropped: softmax does not ask in which order keys come."""
    prompt = Prompt(length, dtype)
    first = (length - 1) // BLOCK
    query = torch.randn(LAYERS, 1, HEADS, SIZE).to(dtype)
    before = [prompt.stock(layer, query[layer]) for layer in range(LAYERS)]
    kept = KeptPages.of(prompt.pages, prompt.blocks[:first], np.full((LAYERS, KV_HEADS), first))
    shuffled = kept.table.reshape(-1)[torch.randperm(kept.table.size).numpy()].reshape(kept.table.shape)
    kept = KeptPages(kept.blocks, kept.counts, shuffled)
    assert_each_has_one_owner(kept, prompt.pages)
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            order = torch.randperm(first * BLOCK)
            parts = (part[layer, order, head] for part in (prompt.key, prompt.value))
            prompt.pages.write(layer, kept.table[layer, head], *parts)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.01}
    for layer in range(LAYERS):
        found = prompt.by_heads(layer, query[layer], kept, first)
        torch.testing.assert_close(found, before[layer], **tolerance)


def test_blocks_that_are_given_back_are_not_read_and_later_ones_are() -> None:
    """9 blocks compacted to 3, heads with 1 to 6 pages, then 70 more tokens by the engine's own writes."""
    prompt = Prompt(8 * BLOCK + 5)
    counts = np.array([[1, 6], [2, 1], [3, 5]])
    first, keep = 8, 3
    kept = KeptPages.of(prompt.pages, prompt.blocks[:keep], counts)
    assert_each_has_one_owner(kept, prompt.pages)
    chosen = {}
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            rows = torch.randperm(first * BLOCK)[: counts[layer, head] * BLOCK].sort().values
            chosen[layer, head] = rows
            parts = (part[layer, rows, head] for part in (prompt.key, prompt.value))
            prompt.pages.write(layer, kept.table[layer, head, : counts[layer, head]], *parts)
    for attention in prompt.modules:  # another request's now
        attention.kv_cache[prompt.blocks[keep:first]] = torch.nan
    free = [block for block in range(BLOCKS) if block not in prompt.blocks]
    for _ in range(70):
        if prompt.length % BLOCK == 0:
            prompt.blocks.append(free.pop())
        fresh = torch.randn(2, LAYERS, 1, KV_HEADS, SIZE)
        prompt.key, prompt.value = (
            torch.cat([old, new], 1) for old, new in zip((prompt.key, prompt.value), fresh, strict=True)
        )
        for layer in range(LAYERS):
            prompt.write(layer, *fresh[:, layer], prompt.length)
        prompt.length += 1
        layer = prompt.length % LAYERS
        query = torch.randn(1, HEADS, SIZE)
        found = prompt.by_heads(layer, query, kept, first)
        for head in range(KV_HEADS):
            rows = torch.cat([chosen[layer, head], torch.arange(first * BLOCK, prompt.length)])
            key, value = prompt.key[layer, rows, head], prompt.value[layer, rows, head]
            own = query[0].view(KV_HEADS, GROUP, SIZE)[head]
            expected = (own @ key.T * SIZE**-0.5).softmax(-1) @ value
            torch.testing.assert_close(
                found[0].view(KV_HEADS, GROUP, SIZE)[head], expected, rtol=1e-3, atol=1e-4
            )
