"""Chunks prefilled behind the text before them: exact where prompts have them in a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from blendrag import BlendIndex, Document
from blendrag.lab.scratch import ScratchStore, scratch_store
from blendrag.prompt import start_prefix
from blendrag.settings import Settings
from workbench import FIRST, Bench, Prompt, distance

pytestmark = pytest.mark.engine

CLOSE = 2e-3  # float32, two orders of the same sums


@pytest.fixture(scope="module")
def store(bench: Bench, settings: Settings) -> Iterator[ScratchStore]:
    """A document of four chunks."""
    settings = settings.model_copy(update={"context_tokens": 2048})
    with scratch_store(bench.engine, settings, [piece.token_ids for piece in bench.pieces[:4]]) as store:
        yield store


def distances(bench: Bench, store: ScratchStore, order: tuple[int, ...]) -> float:
    """From full prefill to full reuse of these chunks in a row."""
    prompt = Prompt().fresh(start_prefix(bench.tokenizer))
    for number in order:
        prompt = prompt.cached(store.chunks[number])
    prompt = prompt.fresh(bench.encode("\nIn short, the packages above are"))
    full = bench.plain(prompt)
    bench.reset()
    recipe = replace(bench.recipe(prompt, ratio=0.0), store=store.id)
    reused = bench.engine.generate(prompt.token_ids, FIRST, recipe)
    assert reused.report and not reused.report.fallback and not reused.report.missing
    return distance(full, reused)


def test_documents_in_a_row_need_no_repair(bench: Bench, store: ScratchStore) -> None:
    assert [len(chunk.context) > 0 for chunk in store.chunks] == [False, True, True, True]
    assert distances(bench, store, (0, 1, 2, 3)) < CLOSE
    assert distances(bench, store, (3, 1)) > 10 * CLOSE, "the test could not tell"


def test_chunk_that_is_prefilled_again_alone_is_the_same(bench: Bench, store: ScratchStore) -> None:
    last = store.chunks[3]
    store.client.delete([last.key])
    store.ingest([last])
    assert distances(bench, store, (0, 1, 2, 3)) < CLOSE


def test_deleted_document_leaves_no_text_in_the_kv_of_others(
    open_index: Callable[..., BlendIndex], bench: Bench
) -> None:
    texts = [bench.tokenizer.decode(list(piece.token_ids)) for piece in bench.pieces[:3]]
    shared, secret = texts[0], texts[1]
    with open_index("contexts", chunk_tokens=64) as index:
        index.ingest([Document(f"{secret}\n\n{shared}", "secret"), Document(shared, "open")])
        index.delete("secret")
        kept = index._library.catalogue.entries()
        words = set(bench.encode(secret)) - set(bench.encode(shared))
        assert kept and not any(words & {*entry.token_ids, *entry.context} for entry in kept)
