"""Eviction of a prompt's KV, and reading what is left, by the worker's own code in vLLM's modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from blendrag.attention.runs import dense_attention, find_runs
from blendrag.attention.scores import Scores
from blendrag.engine.compat import head_attention
from blendrag.engine.compat.model import attend, attention_metadata
from blendrag.engine.recipe import BlendOrder, EvictionOrder, Recipe
from blendrag.engine.worker import compression as evicting
from blendrag.engine.worker.blending import LoadedModel
from blendrag.engine.worker.compression import Compression
from blendrag.lab.worker.layer_loss import LabCompression, Study
from blendrag.lab.worker.operations import MEASURED
from blendrag.options import BlendOptions
from small_decoder import BLOCKS, KV_HEADS, SIZE, small_model

LAYERS, HEADS = 3, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    """With all layers' KV in one allocation, as an engine has it."""
    head_attention.register()
    with pytest.MonkeyPatch.context() as started:
        started.setattr(head_attention, "started_to_evict", lambda: True)
        found = small_model(tmp_path_factory.mktemp("model"), LAYERS)
    AttentionBackendEnum.CPU_ATTN.clear_override()
    like = found.decoder.attentions[0].kv_cache
    memory = torch.zeros(LAYERS, *like.shape)
    for attention, cache in zip(found.decoder.attentions, memory, strict=True):
        attention.kv_cache = cache
    yield found


class Request:
    """A prompt, in the cache as an engine has written it when its last token is computed."""

    def __init__(self, model: LoadedModel, name: str, tokens: int, blocks: list[int], **options: Any) -> None:
        torch.manual_seed(tokens)
        self.model, self.name, self.blocks, self.tokens = model, name, blocks, tokens
        self.options = BlendOptions(**options)
        self.key, self.value = torch.randn(2, LAYERS, tokens, KV_HEADS, SIZE)
        self.query = torch.randn(LAYERS, tokens, HEADS, SIZE)
        self.append(0)

    def append(self, first: int) -> None:
        pages = self.model.cache.pages(self.blocks)
        places = pages.places(np.arange(first, self.key.shape[1]))
        for layer in range(LAYERS):
            pages.write(layer, places, self.key[layer, first:], self.value[layer, first:])

    def grow(self) -> None:
        """By one generated token."""
        fresh = torch.randn(2, LAYERS, 1, KV_HEADS, SIZE)
        self.key, self.value = torch.cat([self.key, fresh[0]], 1), torch.cat([self.value, fresh[1]], 1)
        self.append(self.key.shape[1] - 1)

    def blended(self, compression: Compression) -> None:
        """Its passes, the second of which is the one that counts."""
        ids = list(range(self.tokens - 1))
        recipe = Recipe("store", (("a", 3, self.tokens - 60),), self.options)
        window = compression.window(BlendOrder(self.name, "", ids, self.blocks, 0, recipe))
        if window is not None:
            for layer in range(LAYERS):
                window.note(layer, np.array([1, len(ids) - 1]), torch.randn(2, HEADS, SIZE))
                rows = np.arange(0, len(ids))
                for at in (rows[:50], rows[50:]):
                    window.note(layer, at, self.query[layer, at])

    def order(self) -> EvictionOrder:
        return EvictionOrder(self.name, self.blocks, self.tokens)


def outputs(model: LoadedModel, requests: list[Request], rows: list[int]) -> torch.Tensor:
    """A step of the engine's: of each request its last so many tokens, in every layer."""
    lengths = [request.key.shape[1] for request in requests]
    spans = [np.arange(n - count, n) for n, count in zip(lengths, rows, strict=True)]
    sequences = np.repeat(np.arange(len(requests)), rows)
    width = max(len(request.blocks) for request in requests)
    table = torch.tensor([request.blocks + [0] * (width - len(request.blocks)) for request in requests])
    runs = find_runs(np.concatenate(spans), sequences)
    metadata = attention_metadata(model.cache.runner, runs, table.int(), torch.zeros(sum(rows)).long())
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(sum(rows), HEADS, SIZE, generator=generator)
    found = []
    for attention in model.decoder.attentions:
        found.append(attend(attention, query, attention.kv_cache, metadata[attention.layer_name]))
    return torch.stack(found)


@pytest.mark.parametrize("allocator", ["uniform", "ada", "joint", "pyramid", "ada_pyramid"])
@pytest.mark.parametrize("scorer", ["window", "critical", "recent", "random"])
def test_what_is_read_after_eviction_is_not_what_was_kept(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, allocator: str, scorer: str
) -> None:
    size = model.cache.block_size
    compression = Compression.of(model.decoder, model.cache)
    assert compression.reason is None
    chosen: list[torch.Tensor] = []

    def noted(scores: torch.Tensor, count: int) -> torch.Tensor:
        chosen.append(kept_tokens(scores, count))
        return chosen[-1]

    kept_tokens = evicting.kept_tokens
    monkeypatch.setattr(evicting, "kept_tokens", noted)
    options = {"kv_budget": 4 * size, "kv_allocator": allocator, "kv_scorer": scorer}
    evicted = Request(model, "evicted", 7 * size + 11, [9, 3, 17, 5, 11, 2, 8, 14, 20], **options)
    other = Request(model, "other", 2 * size + 5, [0, 1, 4])
    for request in (evicted, other):
        request.blended(compression)
    done = compression.evict(evicted.order())
    assert done.whole is None
    assert (done.tokens, done.first, done.last, done.first_block) == (3 * size + 11, 3, 7, 9)
    assert sum(map(len, chosen)) == LAYERS * KV_HEADS * 3 * size
    for attention in model.decoder.attentions:
        attention.kv_cache[evicted.blocks[3:7]] = torch.nan
    for _ in range(size):  # over an edge
        evicted.grow()
    found = outputs(model, [other, evicted, other], [1, 3, 7])
    query = torch.randn(11, HEADS, SIZE, generator=torch.Generator().manual_seed(5))
    scale, group = model.decoder.attentions[0].impl.scale, HEADS // KV_HEADS
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            own = slice(head * group, (head + 1) * group)
            rows = torch.cat([chosen[layer * KV_HEADS + head], torch.arange(7 * size, evicted.key.shape[1])])
            key, value = evicted.key[layer, rows, head, None], evicted.value[layer, rows, head, None]
            at = torch.arange(len(rows) - 3, len(rows))
            expected = dense_attention(query[1:4, own], key, value, at, Scores(scale))
            torch.testing.assert_close(found[layer, 1:4, own], expected, rtol=1e-3, atol=1e-4)
        for rows, at in (
            (slice(0, 1), [other.tokens - 1]),
            (slice(4, 11), range(other.tokens - 7, other.tokens)),
        ):
            expected = dense_attention(
                query[rows], other.key[layer], other.value[layer], torch.tensor(list(at)), Scores(scale)
            )
            torch.testing.assert_close(found[layer, rows], expected, rtol=1e-3, atol=1e-4)
    # Its blocks are another request's, later: nothing of it is left.
    compression.forget({"evicted"})
    again = Request(model, "again", 3 * size, evicted.blocks[:3])
    found = outputs(model, [again], [1])
    for layer in range(LAYERS):
        at = torch.tensor([again.tokens - 1])
        expected = dense_attention(query[:1], again.key[layer], again.value[layer], at, Scores(scale))
        torch.testing.assert_close(found[layer], expected, rtol=1e-3, atol=1e-4)


def test_window_tokens_are_evicted_or_the_last_block(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = model.cache.block_size
    compression = Compression.of(model.decoder, model.cache)
    chosen: list[torch.Tensor] = []
    kept_tokens = evicting.kept_tokens

    def noted(scores: torch.Tensor, count: int) -> torch.Tensor:
        chosen.append(kept_tokens(scores, count))
        return chosen[-1]

    monkeypatch.setattr(evicting, "kept_tokens", noted)
    for tokens in (5 * size + 1, 5 * size + 20, 6 * size):
        chosen.clear()
        request = Request(model, "a", tokens, list(range(6)), kv_budget=2 * size, kv_allocator="joint")
        request.blended(compression)
        assert compression.evict(request.order()).freed == 4
        for rows in chosen:
            assert {at for at in range(tokens - 1 - 32, tokens) if at < 5 * size} <= set(rows.tolist())
        compression.forget({"a"})


@pytest.mark.parametrize(
    ("tokens", "options", "reason"),
    [
        (200, {"kv_budget": 10_000}, "the prompt is no longer than the budget"),
        (2000, {"kv_budget": 100}, "kv_budget is below"),
        (2000, {"kv_budget": 600, "kv_scorer": "windo"}, "unknown kv_scorer"),
        (2000, {"kv_budget": 600, "kv_allocator": "adda"}, "unknown kv_allocator"),
    ],
)
def test_kv_is_touched_where_it_is_kept_whole(
    model: LoadedModel, tokens: int, options: dict[str, Any], reason: str
) -> None:
    size = model.cache.block_size
    compression = Compression.of(model.decoder, model.cache)
    request = Request(model, "a", tokens, list(range(-(-tokens // size))), **options)
    request.blended(compression)
    before = [attention.kv_cache.clone() for attention in model.decoder.attentions]
    done = compression.evict(request.order())
    assert done.whole is not None and reason in done.whole and not done.spoilt and not done.freed
    after = [attention.kv_cache for attention in model.decoder.attentions]
    assert all(a.view(torch.int32).equal(b.view(torch.int32)) for a, b in zip(before, after, strict=True))


def test_prompt_that_was_not_blended_or_left_to_the_engine_is_evicted(model: LoadedModel) -> None:
    size = model.cache.block_size
    compression = Compression.of(model.decoder, model.cache)
    request = Request(model, "a", 6 * size, list(range(6)), kv_budget=3 * size)
    assert compression.evict(request.order()).whole == "it was not blended to its end"
    request.blended(compression)
    longer = replace(request.order(), tokens=6 * size + 40, block_ids=list(range(8)))
    assert compression.evict(longer).whole == "the question is left to the engine"


def test_error_before_the_first_write_loses_kv_and_one_behind_it_is_not_told(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = model.cache.block_size
    compression = Compression.of(model.decoder, model.cache)
    request = Request(model, "a", 6 * size, list(range(6)), kv_budget=3 * size)

    def fails(*_: Any) -> None:
        raise MemoryError("no room")

    for where, spoilt in (("PageReader.rows", False), ("HeadPages.write", True)):
        request.blended(compression)
        with monkeypatch.context() as patched:
            patched.setattr(f"blendrag.engine.worker.head_pages.{where}", fails)
            done = compression.evict(request.order())
        assert done.whole == "MemoryError: no room" and done.spoilt == spoilt and not done.freed
    assert outputs(model, [request], [1]).isfinite().all()


def test_layers_with_kv_apart_are_compressed(model: LoadedModel) -> None:
    attentions = model.decoder.attentions
    first = attentions[0].kv_cache
    attentions[0].kv_cache = first.clone()
    try:
        compression = Compression.of(model.decoder, model.cache)
        assert compression.reason == "its layers' KV is not in one allocation"
        request = Request(model, "a", 900, list(range(BLOCKS)), kv_budget=300)
        request.blended(compression)
        assert compression.evict(request.order()).whole == compression.reason
    finally:
        attentions[0].kv_cache = first


def test_study_of_layers_measures_other_tokens_or_evicts_them(model: LoadedModel) -> None:
    size, answer = model.cache.block_size, 15
    compression = LabCompression.of(model.decoder, model.cache)
    request = Request(model, "a", 7 * size + 40, list(range(9)), kv_budget=9 * size, kv_window=32 + answer)
    request.blended(compression)
    end = request.tokens - 1
    prompt = end - answer
    last = (prompt - 1) // size * size
    ways = [("recent", "uniform", 4 * size), ("window", "ada", 4 * size), ("window", "ada", 90 * size)]
    compression.study = study = Study(ways, 0.5, prompt)
    assert compression.evict(request.order()).whole == MEASURED
    assert [(one.scorer, one.allocator, one.budget) for one in study.found] == ways[:2]
    kept = torch.zeros(end, dtype=torch.bool)
    kept[:4] = kept[last - (3 * size - 4) :] = True
    group, scale = HEADS // KV_HEADS, model.decoder.attentions[0].impl.scale
    for layer in range(LAYERS):
        key = request.key[layer, :end].repeat_interleave(group, 1)
        products = torch.einsum("qhd,nhd->hqn", request.query[layer, prompt:end], key) * scale
        later = torch.ones(answer, end, dtype=torch.bool).triu(prompt + 1)
        share = products.masked_fill(later, float("-inf")).softmax(-1)[..., kept].sum(-1).mean()
        assert study.found[0].kept[layer] == pytest.approx(float(share), rel=1e-4)
    assert all(0 < lost < 2 for one in study.found for lost in one.lost)
    compression.study = None
    request.blended(compression)
    assert compression.evict(request.order()).whole == "the prompt is no longer than the budget"
