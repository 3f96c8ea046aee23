"""Chunks prefilled behind the system prompt: exact where they stand right behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from blendrag import BlendIndex
from blendrag.engine.client.generation import Delta
from blendrag.errors import StoreMismatchError
from blendrag.lab.scratch import ScratchStore, scratch_store
from blendrag.prompt import shared_prefix
from blendrag.settings import Settings
from workbench import FIRST, Bench, Prompt, distance

pytestmark = pytest.mark.engine

CLOSE = 2e-3  # float32, two orders of the same sums
QUESTION = "\nIn short, the packages above are"


@dataclass(slots=True)
class Behind:
    """Two chunks stored behind a system prompt."""

    bench: Bench
    store: ScratchStore
    prefix: tuple[int, ...]

    def prompt(self, count: int) -> Prompt:
        prompt = Prompt().fresh(self.prefix)
        for chunk in self.store.chunks[:count]:
            prompt = prompt.cached(chunk)
        return prompt.fresh(self.bench.encode(QUESTION))

    def blended(self, prompt: Prompt, **options: Any) -> Delta:
        self.bench.reset()
        recipe = replace(self.bench.recipe(prompt, **options), store=self.store.id)
        delta = self.bench.engine.generate(prompt.token_ids, FIRST, recipe)
        assert delta.report and not delta.report.fallback, delta.report
        return delta

    def deviating(self, prompt: Prompt, layer: int) -> int:
        """Tokens whose K or V at ``layer`` is not what full prefill gives."""
        selector = f"hkvd:metric=kv:check_layers={layer}:threshold=1e-6"
        report = self.blended(prompt, ratio=1.0, selector=selector).report
        assert report is not None
        computed = sum(prompt.spans[-1][1:]) % self.bench.engine.facts.block_size  # whatever they deviate
        return int(report.recomputed) - computed


@pytest.fixture(scope="module")
def behind(bench: Bench, settings: Settings) -> Iterator[Behind]:
    shared = settings.model_copy(update={"shared_prefix": "system", "context_tokens": 0})
    pieces = [piece.token_ids for piece in bench.pieces[:2]]
    prefix = shared_prefix(bench.tokenizer, shared.system_prompt, shared.separator)
    with scratch_store(bench.engine, shared, pieces, filled=False) as store:
        done = store.client.ingest(store.chunks)
        store.client.flush()
        assert done.tokens == sum(map(len, pieces)), "the prefix is not what was ingested"
        yield Behind(bench, store, prefix)


@pytest.mark.parametrize("layer", [1, 2, 10, 20, 29])
def test_first_chunk_behind_its_prefix_deviates_at_no_layer(behind: Behind, layer: int) -> None:
    assert behind.deviating(behind.prompt(1), layer) == 0
    second = behind.deviating(behind.prompt(2), layer)
    assert 0 < second <= len(behind.store.chunks[1].token_ids), "the second one has not seen the first"


def test_full_reuse_of_the_first_chunk_is_full_prefill(behind: Behind) -> None:
    prompt = behind.prompt(1)
    full = behind.bench.plain(prompt)
    assert distance(full, behind.blended(prompt, ratio=0.0)) < CLOSE
    alone = Prompt().fresh(behind.prefix).cached(behind.bench.pieces[0]).fresh(behind.bench.encode(QUESTION))
    assert alone.token_ids == prompt.token_ids
    assert distance(full, behind.bench.blended(alone, ratio=0.0)) > 10 * CLOSE, "the test could not tell"


def test_chunks_of_one_batch_do_not_see_each_other(behind: Behind, settings: Settings) -> None:
    shared = settings.model_copy(update={"shared_prefix": "system", "context_tokens": 0})
    engine, together = behind.bench.engine, behind.blended(behind.prompt(2), ratio=0.0)
    pieces = [chunk.token_ids for chunk in behind.store.chunks]
    with scratch_store(engine, shared, pieces, filled=False) as store:
        for chunk in store.chunks:
            store.client.ingest([chunk])
        store.client.flush()
        other = replace(behind, store=store)
        apart = other.blended(other.prompt(2), ratio=0.0)
    assert distance(together, apart) < CLOSE


def test_index_answers_from_one_document_behind_its_prompt_as_full_prefill_does(
    open_index: Callable[..., BlendIndex], folder: Path, bench: Bench
) -> None:
    options = {"shared_prefix": "system", "similarity_top_k": 1, "recompute_ratio": 0.0, "max_tokens": 16}
    index = open_index("shared", **options)
    index.ingest(folder)
    bench.reset()
    blended = index.ask("What is the package for?")
    assert blended.evidence.plain is None and blended.evidence.reused > 0
    bench.reset()
    assert index.ask("What is the package for?", blend=False).text == blended.text
    index.close()
    with pytest.raises(StoreMismatchError, match="shared_prefix='system', not shared_prefix='start'"):
        open_index("shared")


def test_text_that_fits_the_window_only_without_the_prefix_is_left_out(
    open_index: Callable[..., BlendIndex], bench: Bench
) -> None:
    window = bench.engine.max_model_len
    index = open_index("long", shared_prefix="system", chunk_tokens=window - 1)
    text = bench.tokenizer.decode([i for piece in bench.pieces for i in piece.token_ids]) * 3
    report = index.ingest([text])
    assert report.too_long >= 1
    bench.reset()  # the engine is alive
