"""Requests whose KV is evicted and read, by the worker's own code in vLLM's modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from blendrag.attention.runs import dense_attention, find_runs
from blendrag.attention.scores import Scores
from blendrag.engine.budget import compression as evicting
from blendrag.engine.budget.compression import Compression
from blendrag.engine.compat.model import attend, attention_metadata
from blendrag.engine.forward.prompt_forward import LoadedModel
from blendrag.engine.wire.recipe import BlendOrder, EvictionOrder, Recipe
from blendrag.options import BlendOptions
from small_decoder import KV_HEADS, SIZE

LAYERS, HEADS = 3, 4


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class Request:
    """A prompt, in the cache as an engine has written it when its last token is computed."""

    def __init__(self, model: LoadedModel, name: str, tokens: int, blocks: list[int], **options: Any) -> None:
        torch.manual_seed(tokens)
        self.model, self.name, self.blocks, self.tokens = model, name, blocks, tokens
        self.options, self.layers = BlendOptions(**options), model.decoder.num_layers
        self.key, self.value = torch.randn(2, self.layers, tokens, KV_HEADS, SIZE)
        self.query = torch.randn(self.layers, tokens, HEADS, SIZE)
        self.append(0)

    def append(self, first: int) -> None:
        pages = self.model.cache.pages(self.blocks)
        places = pages.places(np.arange(first, self.key.shape[1]))
        for layer in range(self.layers):
            pages.write(layer, places, self.key[layer, first:], self.value[layer, first:])

    def grow(self) -> None:
        """By one generated token."""
        fresh = torch.randn(2, self.layers, 1, KV_HEADS, SIZE)
        self.key, self.value = torch.cat([self.key, fresh[0]], 1), torch.cat([self.value, fresh[1]], 1)
        self.append(self.key.shape[1] - 1)

    def blended(
        self, compression: Compression, put: Callable[[torch.Tensor], torch.Tensor] = as_it_is, left: int = 1
    ) -> None:
        """Its passes, the second of which is the one that counts. put: moves Q to where it is. left: rows
        that the engine computes behind them."""
        ids = list(range(self.tokens - left))
        recipe = Recipe("store", (("a", 3, self.tokens - 60),), self.options)
        note = compression.blending(BlendOrder(self.name, "", ids, self.blocks, 0, recipe)).note
        if note is not None:
            for layer in range(self.layers):
                note(layer, np.array([1, len(ids) - 1]), put(torch.randn(2, HEADS, SIZE)))
                rows = np.arange(0, len(ids))
                for at in (rows[:50], rows[50:]):
                    note(layer, at, put(self.query[layer, at]))

    def order(self) -> EvictionOrder:
        return EvictionOrder(self.name, "", self.blocks, self.tokens)


def outputs(
    model: LoadedModel,
    requests: list[Request],
    rows: list[int],
    put: Callable[[torch.Tensor], torch.Tensor] = as_it_is,
) -> torch.Tensor:
    """A step of the engine's: of each request its last so many tokens, in every layer. put: moves what the
    engine has there to the device."""
    lengths = [request.key.shape[1] for request in requests]
    spans = [np.arange(n - count, n) for n, count in zip(lengths, rows, strict=True)]
    sequences = np.repeat(np.arange(len(requests)), rows)
    width = max(len(request.blocks) for request in requests)
    table = torch.tensor([request.blocks + [0] * (width - len(request.blocks)) for request in requests])
    runs = find_runs(np.concatenate(spans), sequences)
    metadata = attention_metadata(model.cache.runner, 0, runs, table.int(), torch.zeros(sum(rows)).long())
    of_step = next(iter(metadata.values()))
    there = {name: put(getattr(of_step, name)) for name in ("query_start_loc", "seq_lens", "block_table")}
    of_step = replace(of_step, **there)
    generator = torch.Generator().manual_seed(5)
    query = put(torch.randn(sum(rows), HEADS, SIZE, generator=generator))
    attentions = model.decoder.attentions
    return torch.stack([attend(each, query, each.kv_cache, of_step) for each in attentions])


def note_chosen(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The tokens that are kept from now on, of each head of each layer."""
    chosen: list[torch.Tensor] = []
    kept_tokens = evicting.kept_tokens

    def noted(scores: torch.Tensor, count: int) -> torch.Tensor:
        chosen.append(kept_tokens(scores, count))
        return chosen[-1]

    monkeypatch.setattr(evicting, "kept_tokens", noted)
    return chosen


def evict_and_read(model: LoadedModel, monkeypatch: pytest.MonkeyPatch, choices: str = "") -> None:
    """Steps of requests, one of them evicted, against exact attention over what was kept."""
    size = model.cache.block_size
    compression = Compression(model.decoder, model.cache)
    assert compression.reason is None
    chosen = note_chosen(monkeypatch)
    options = {"kv_budget": f"{4 * size}{choices}"}
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
    outputs(model, [evicted], [1])
    for _ in range(size):  # over an edge
        evicted.grow()
    scale, group = model.decoder.attentions[0].impl.scale, HEADS // KV_HEADS
    for rows in ([1, 3, 7], [1, 1, 1], [1, 1, 1, 1]):  # one step has prompts in it
        requests = [other, evicted, other, other][: len(rows)]
        found = outputs(model, requests, rows)
        query = torch.randn(sum(rows), HEADS, SIZE, generator=torch.Generator().manual_seed(5))
        first = 0
        for request, count in zip(requests, rows, strict=True):
            at, first = slice(first, first + count), first + count
            for layer in range(LAYERS):
                for head in range(KV_HEADS):
                    own = slice(head * group, (head + 1) * group)
                    kept = torch.arange(request.key.shape[1])
                    if request is evicted:
                        kept = torch.cat([chosen[layer * KV_HEADS + head], kept[7 * size :]])
                    key, value = (part[layer, kept, head, None] for part in (request.key, request.value))
                    last = torch.arange(len(kept) - count, len(kept))
                    expected = dense_attention(query[at, own], key, value, last, Scores(scale))
                    torch.testing.assert_close(found[layer, at, own], expected, rtol=1e-3, atol=1e-4)
    # Its blocks are another request's, later: nothing of it is left.
    compression.forget({"evicted"})
    again = Request(model, "again", 3 * size, evicted.blocks[:3])
    found = outputs(model, [again], [1])
    for layer in range(LAYERS):
        at = torch.tensor([again.tokens - 1])
        expected = dense_attention(query[:1], again.key[layer], again.value[layer], at, Scores(scale))
        torch.testing.assert_close(found[layer], expected, rtol=1e-3, atol=1e-4)
