"""The KV of a model that drafts, beside that of the model it drafts for: made at ingest, reused in blends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context

from blendrag.attention.runs import find_runs
from blendrag.engine.blend.blending import Choices
from blendrag.engine.compat.drafts import DraftingModel
from blendrag.engine.compat.model import attention_metadata, name_of
from blendrag.engine.forward.prompt_forward import LoadedModel
from blendrag.engine.forward.slices import exhaust
from blendrag.engine.ingest.chunk_prefill import ChunkPrefill, ChunkTokens
from blendrag.engine.worker.selfcheck import join_drafts
from blendrag.options import BlendOptions
from blendrag.store.record import NO_DRAFTS, DraftLayers
from chunked_prompt import BLOCK_IDS, NEXT_ID, ChunkedPrompt
from small_decoder import small_model

LAYERS, BLOCK = 4, 32
METHODS = ["eagle", "eagle3", "draft_model"]


@pytest.fixture(scope="module", params=METHODS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return small_model(tmp_path_factory.mktemp("model"), LAYERS, block_size=BLOCK, drafts=request.param)


def stored_as(model: LoadedModel) -> DraftLayers:
    assert model.drafts is not None
    return model.drafts.stored_as


def kv_of_drafts(model: LoadedModel, count: int) -> torch.Tensor:
    """Of a prompt's first tokens, as it is in the pages: [layers, 2, count, kv_heads, head_size]."""
    read = model.cache.pages(BLOCK_IDS).reader(np.arange(count))
    layers = range(LAYERS, LAYERS + stored_as(model).layers)
    return torch.stack([torch.stack(read(layer)) for layer in layers]).clone()


@torch.inference_mode()
def by_vllm(model: LoadedModel, ids: Sequence[int]) -> None:
    """Both models' own forwards over a prompt, in vLLM's own attention, into the pages."""
    runner, positions = model.cache.runner, np.arange(len(ids))
    table = model.cache.pages(BLOCK_IDS)._attended[0]
    slots = torch.from_numpy(table.slots(positions, 0))
    runs = find_runs(positions, np.zeros_like(positions))
    metadata = attention_metadata(runner, 0, runs, table.on_device, slots)
    by_name = {name_of(each): slots for each in model.cache.attentions}
    tokens, at = torch.tensor(ids), torch.from_numpy(positions)
    drafter, config = runner.get_draft_model(), runner.vllm_config
    with (
        set_current_vllm_config(config),
        set_forward_context(metadata, config, len(ids), slot_mapping=by_name, skip_compiled=True),
    ):
        states: Any = runner.get_model()(tokens, at)
        if config.speculative_config.method == "draft_model":
            drafter(input_ids=tokens, positions=at)
            return
        if isinstance(states, tuple):
            states = drafter.combine_hidden_states(torch.cat(states[1], -1))
        following = torch.tensor([*ids[1:], NEXT_ID])
        drafter(input_ids=following, positions=at, hidden_states=states)


def test_blend_of_ratio_1_has_the_kv_that_drafting_behind_a_prefill_has(
    tmp_path: Path, model: LoadedModel
) -> None:
    prompt = ChunkedPrompt(LAYERS, drafts=stored_as(model))
    by_vllm(model, prompt.ids)
    expected = kv_of_drafts(model, len(prompt.ids))
    assert expected.abs().amax((1, 3, 4)).min() > 0
    model.cache.write_blocks(BLOCK_IDS, torch.zeros_like(model.cache.read_blocks(BLOCK_IDS)))
    prompt.blend(model, tmp_path / "kv", BlendOptions(1.0))
    torch.testing.assert_close(kv_of_drafts(model, len(prompt.ids)), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("options", [BlendOptions(0.0, "none"), BlendOptions(0.3, "query:shift=no")], ids=str)
@pytest.mark.parametrize("idle", [True, False], ids=["at once", "in pieces"])
def test_stored_kv_is_moved_and_all_that_is_computed_is_repaired(
    tmp_path: Path, model: LoadedModel, options: BlendOptions, idle: bool
) -> None:
    prompt = ChunkedPrompt(LAYERS, drafts=stored_as(model))
    prompt.blend(model, tmp_path / "exact", BlendOptions(1.0))
    exact = kv_of_drafts(model, len(prompt.ids))
    model.cache.write_blocks(BLOCK_IDS, torch.zeros_like(model.cache.read_blocks(BLOCK_IDS)))
    report = prompt.blend(model, tmp_path / "kv", options, idle=idle)
    found, computed = kv_of_drafts(model, len(prompt.ids)), positions_of(report.computed_at, len(prompt.ids))
    assert found.abs().amax((1, 3, 4)).min() > 0, "nothing is left out"
    before = [position for position in range(20) if position in computed]
    torch.testing.assert_close(found[:, :, before], exact[:, :, before], rtol=1e-3, atol=1e-3)
    drafts = model.drafts
    assert drafts is not None
    for chunk, (_, start, count) in zip(prompt.chunks, prompt.spans, strict=True):
        kept = [place for place in range(count) if start + place not in computed]
        at = torch.tensor([start + place for place in kept])
        for layer in range(drafts.num_layers):
            key, value = chunk.kv[LAYERS + layer][:, kept]
            torch.testing.assert_close(found[layer, 0, at], drafts.rotate_keys(layer, at, key.clone()))
            torch.testing.assert_close(found[layer, 1, at], value)


@pytest.mark.parametrize("idle", [True, False], ids=["at once", "in pieces"])
@pytest.mark.parametrize(
    ("selector", "written"),
    # Behind a hit inside a chunk, its beginning is not in the pages as it was stored, which shifts the rest.
    [("query", 0), *product(("query:shift=no", "first_k", "none", "all"), (0, 2 * BLOCK))],
)
def test_model_that_drafts_for_itself_has_the_same_kv_twice(
    tmp_path: Path, selector: str, idle: bool, written: int
) -> None:
    """Whatever is repaired and shifted, also behind a hit, and of chunks that were ingested."""
    model = small_model(tmp_path / "model", LAYERS, block_size=BLOCK, drafts="itself")
    prompt, choices = ChunkedPrompt(LAYERS, drafts=stored_as(model)), Choices()
    prefill = ChunkPrefill(model.decoder, model.cache, (), model.drafts)
    made = exhaust(prefill.run([ChunkTokens(chunk.key, chunk.token_ids) for chunk in prompt.chunks]))
    prompt.chunks = [replace(chunk, kv=kv) for chunk, kv in zip(prompt.chunks, made, strict=True)]
    options = BlendOptions(0.3, selector)
    for number, there in enumerate({0, written}):
        prompt.blend(model, tmp_path / str(number), options, there, choices, idle)
        read = model.cache.pages(BLOCK_IDS).reader(np.arange(len(prompt.ids)))
        for layer in range(LAYERS):
            torch.testing.assert_close(read(LAYERS + layer), read(layer), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("selector", ["hkvd", "gradual"])
def test_rows_that_are_dropped_on_the_way_keep_their_stored_kv(
    tmp_path: Path, model: LoadedModel, selector: str
) -> None:
    prompt = ChunkedPrompt(LAYERS, drafts=stored_as(model))
    report = prompt.blend(model, tmp_path / "kv", BlendOptions(0.2, selector))
    computed, found = positions_of(report.computed_at, len(prompt.ids)), kv_of_drafts(model, len(prompt.ids))
    assert report.recomputed and len(computed) < len(prompt.ids)
    for chunk, (_, start, count) in zip(prompt.chunks, prompt.spans, strict=True):
        values = found[:, 1, start : start + count], chunk.kv[LAYERS:, 1]
        same = torch.isclose(*values, atol=1e-5).flatten(2).all(2)[0].tolist()
        assert same == [start + place not in computed for place in range(count)]


def positions_of(ranges: str, end: int) -> set[int]:
    found: set[int] = set()
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        found |= set(range(int(first), int(last or end) + 1 if dash else int(first) + 1))
    return found


def test_chunk_is_stored_with_the_kv_of_drafts(model: LoadedModel) -> None:
    """Behind a prefix and the chunk before it. Of its last token, what stands behind it is not known."""
    assert model.drafts is not None
    prefix, one, two = tuple(range(5)), tuple(range(100, 140)), tuple(range(200, 225))
    prefill = ChunkPrefill(model.decoder, model.cache, prefix, model.drafts)
    chunks = ChunkTokens("one", one), ChunkTokens("two", two, one, "one")
    together = exhaust(prefill.run(chunks))
    apart = [exhaust(prefill.run([chunk])) for chunk in chunks]
    for kv, (again,) in zip(together, apart, strict=True):
        torch.testing.assert_close(kv, again, rtol=1e-3, atol=1e-3)
    by_vllm(model, [*prefix, *one])
    expected, count = kv_of_drafts(model, len(prefix + one)), len(one) - 1
    for layer, (key, value) in enumerate(together[0][LAYERS:, :, :count]):
        at = torch.arange(len(prefix), len(prefix) + count)
        key = model.drafts.rotate_keys(layer, at, key.clone())
        torch.testing.assert_close(key, expected[layer, 0, at], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(value, expected[layer, 1, at], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("other", [NO_DRAFTS, DraftLayers("another head", 2)], ids=["none", "another's"])
def test_chunks_without_this_models_drafts_are_blended_as_ever(
    tmp_path: Path, model: LoadedModel, other: DraftLayers
) -> None:
    found: list[list[torch.Tensor]] = []
    for drafts in (stored_as(model), other):
        prompt = ChunkedPrompt(LAYERS, drafts=drafts)
        report = prompt.blend(model, tmp_path / f"{len(found)}", BlendOptions(0.3))
        assert not report.missing and report.recomputed
        read = model.cache.pages(BLOCK_IDS).reader(np.arange(len(prompt.ids)))
        found.append([torch.stack(read(layer)).clone() for layer in range(LAYERS)])
    torch.testing.assert_close(*found)


def test_structure_that_cannot_be_run_apart_drafts_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Then nothing of it is stored, and chunks are blended."""
    monkeypatch.setattr(DraftingModel, "run", lambda *_: None)
    model = small_model(tmp_path / "model", LAYERS, block_size=BLOCK, drafts="eagle")
    assert "does not call all of its layers" in caplog.text
    assert model.drafts is None and len(model.cache.attentions) == LAYERS
    assert ChunkedPrompt(LAYERS).blend(model, tmp_path / "kv", BlendOptions(0.3)).recomputed


def test_model_of_other_tokens_or_a_shorter_window_is_left_to_vllm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_model(tmp_path / "model", LAYERS, drafts="draft_model")
    config = model.cache.runner.vllm_config.speculative_config
    assert model.drafts is not None
    for name, value, reason in (
        ("use_heterogeneous_vocab", True, "tokens"),
        ("method", "dflash", "not known"),
    ):
        was = getattr(config, name)
        setattr(config, name, value)
        assert join_drafts(model.decoder, model.cache) == (None, model.cache)
        assert reason in caplog.messages[-1]
        setattr(config, name, was)
    config.draft_model_config.max_model_len -= 1
    assert join_drafts(model.decoder, model.cache)[0] is None and "window" in caplog.messages[-1]
