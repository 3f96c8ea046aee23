"""Eviction of a prompt's KV, and reading what is left, by the worker's own code in vLLM's modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from blendrag.engine.budget.compression import Compression
from blendrag.engine.budget.head_pages import HeadPages, PageReader
from blendrag.engine.compat import head_attention
from blendrag.engine.forward.prompt_forward import LoadedModel
from blendrag.engine.wire.recipe import BlendOrder, Recipe
from evictions import HEADS, LAYERS, Request, evict_and_read, note_chosen
from small_decoder import BLOCKS, small_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    """With all layers' KV in one allocation, as an engine has it."""
    yield in_one_allocation(tmp_path_factory.mktemp("model"))


def in_one_allocation(folder: Path, block_size: int | None = None) -> LoadedModel:
    head_attention.register()
    with pytest.MonkeyPatch.context() as started:
        started.setattr(head_attention, "started_to_evict", lambda: True)
        selector._cached_get_attn_backend.cache_clear()  # another model may have been made in this process
        found = small_model(folder, LAYERS, block_size=block_size)
    selector._cached_get_attn_backend.cache_clear()
    AttentionBackendEnum.CPU_ATTN.clear_override()
    like = found.decoder.attentions[0].kv_cache
    memory = torch.zeros(LAYERS, *like.shape)
    for attention, cache in zip(found.decoder.attentions, memory, strict=True):
        attention.kv_cache = cache
    return found


def bits(model: LoadedModel) -> torch.Tensor:
    """What all layers' caches hold; NaN, too."""
    return torch.stack([attention.kv_cache.view(torch.int32) for attention in model.decoder.attentions])


@pytest.mark.parametrize("allocator", ["uniform", "ada", "pyramid", "ada_pyramid"])
@pytest.mark.parametrize("scorer", ["window", "critical"])
def test_what_is_read_after_eviction_is_what_was_kept(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, allocator: str, scorer: str
) -> None:
    evict_and_read(model, monkeypatch, f":{allocator}:{scorer}")


def test_window_tokens_and_the_last_block_stay(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    size = model.cache.block_size
    compression = Compression(model.decoder, model.cache)
    chosen = note_chosen(monkeypatch)
    for tokens in (5 * size + 1, 5 * size + 20, 6 * size):
        chosen.clear()
        request = Request(model, "a", tokens, list(range(6)), kv_budget=2 * size)
        request.blended(compression)
        assert compression.evict(request.order()).freed == 4
        for rows in chosen:
            assert {at for at in range(tokens - 1 - 32, tokens) if at < 5 * size} <= set(rows.tolist())
        compression.forget({"a"})


def test_least_budget_has_room_for_the_window_and_what_the_engine_computes_behind_it(tmp_path: Path) -> None:
    """A CPU without AVX-512 leaves it twelve: the window and these may be more than one block."""
    model, size = in_one_allocation(tmp_path, block_size=32), 32
    compression = Compression(model.decoder, model.cache)
    for tokens, freed, whole in ((5 * size + 12, 4, None), (5 * size + 1, 0, "kv_budget is below 96")):
        request = Request(model, "a", tokens, list(range(6)), kv_budget=2 * size)
        request.blended(compression, left=12)
        done = compression.evict(request.order())
        assert done.freed == freed and (done.whole or "").startswith(whole or ""), done


@pytest.mark.parametrize(
    ("tokens", "options", "reason"),
    [
        (200, {"kv_budget": 10_000}, "the prompt is no longer than the budget"),
        (2000, {"kv_budget": 100}, "kv_budget is below"),
        (2000, {"kv_budget": "600:windo"}, "unknown allocator or scorer"),
        (2000, {"kv_budget": "600:alpha=2"}, "alpha must be"),
    ],
)
def test_kv_is_untouched_where_it_is_kept_whole(
    model: LoadedModel, tokens: int, options: dict[str, Any], reason: str
) -> None:
    size = model.cache.block_size
    compression = Compression(model.decoder, model.cache)
    request = Request(model, "a", tokens, list(range(-(-tokens // size))), **options)
    request.blended(compression)
    before = bits(model)
    done = compression.evict(request.order())
    assert done.whole is not None and reason in done.whole and not done.freed
    assert torch.equal(bits(model), before)


def test_prompt_that_is_kept_whole_says_why(model: LoadedModel) -> None:
    size = model.cache.block_size
    compression = Compression(model.decoder, model.cache)
    request = Request(model, "a", 6 * size, list(range(6)), kv_budget=3 * size)
    assert compression.evict(request.order()).whole == "it was not blended to its end"
    for changed, reason in (
        ({"tokens": 6 * size + 40, "block_ids": list(range(8))}, "the question is left to the engine"),
        ({"block_ids": []}, "its layers' blocks are not in one group"),
    ):
        request.blended(compression)
        assert compression.evict(replace(request.order(), **changed)).whole == reason
    recipe = Recipe("store", (("a", 3, 6 * size - 4),), request.options)
    compression.blending(BlendOrder("a", "", list(range(6 * size - 1)), request.blocks, 0, recipe))
    assert compression.evict(request.order()).whole == "no question stands behind the documents"


@pytest.mark.parametrize("other", ["window", "cap", "sinks", "ALiBi"])
def test_attention_that_pages_do_not_know_is_not_compressed(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    attention = model.decoder.attentions[1]
    if other == "window":
        monkeypatch.setattr(attention, "sliding_window", 64)
    else:
        name = {"cap": "logits_soft_cap", "sinks": "sinks", "ALiBi": "alibi_slopes"}[other]
        monkeypatch.setattr(attention.impl, name, 30.0 if other == "cap" else torch.ones(HEADS))
    compression = Compression(model.decoder, model.cache)
    assert compression.reason == "its attention has windows, caps, sinks or ALiBi"


@pytest.mark.parametrize("where", ["reading", "writing"])
def test_error_leaves_the_kv_of_the_prompt(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    size = model.cache.block_size
    compression = Compression(model.decoder, model.cache)
    request = Request(model, "a", 6 * size, list(range(6)), kv_budget=3 * size)
    request.blended(compression)
    before = bits(model)
    write, written = HeadPages.write, []

    def fails(*arguments: Any) -> None:
        if where == "reading" or len(written) == LAYERS:
            raise MemoryError("no room")
        written.append(arguments)
        write(*arguments)

    of_pages = {"reading": (PageReader, "rows"), "writing": (HeadPages, "write")}
    with monkeypatch.context() as patched:
        patched.setattr(*of_pages[where], fails)
        done = compression.evict(request.order())
    assert done.whole == "MemoryError: no room" and not done.freed
    assert written or where == "reading"
    assert torch.equal(bits(model), before)


def test_layers_with_kv_apart_are_not_compressed(model: LoadedModel) -> None:
    attentions = model.decoder.attentions
    first = attentions[0].kv_cache
    attentions[0].kv_cache = first.clone()
    try:
        compression = Compression(model.decoder, model.cache)
        assert compression.reason == "its layers' KV is not in one allocation"
        request = Request(model, "a", 900, list(range(BLOCKS)), kv_budget=300)
        request.blended(compression)
        assert compression.evict(request.order()).whole == compression.reason
    finally:
        attentions[0].kv_cache = first
