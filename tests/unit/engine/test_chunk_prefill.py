"""What a forward at ingest computes, and what it borrows from rows that are known."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from blendrag.engine.worker.chunk_prefill import ChunkTokens, Forward
from blendrag.prompt.context import Contexts, Ids

IDS = st.lists(st.integers(0, 3), min_size=1, max_size=7).map(tuple)
PREFIX = st.lists(st.integers(7, 9), max_size=3).map(tuple)
CHUNKS = st.lists(st.builds(ChunkTokens, IDS, st.just(()) | IDS), min_size=1, max_size=6)


@given(PREFIX, CHUNKS, st.lists(st.integers(0, 3), max_size=9).map(tuple), st.booleans())
def test_chunk_stands_behind_other_tokens_than_its_own(
    prefix: Ids, chunks: list[ChunkTokens], last: Ids, first: bool
) -> None:
    known = () if first else prefix + last
    plan = Forward.of(prefix, chunks, known)
    ids = [*known, *plan.ids]
    found: list[dict[int, int]] = [{} for _ in chunks]
    for row, position, sequence in plan.borrowed:
        found[sequence][position] = ids[row]
    for id, position, sequence in zip(plan.ids, plan.positions, plan.sequences, strict=True):
        assert position not in found[sequence], "computed, and borrowed too"
        found[sequence][position] = id
    for number, (own, context) in enumerate(chunks):
        whole = (*prefix, *context, *own)
        assert [found[number][position] for position in range(len(found[number]))] == list(whole)
        assert plan.whole[number] == len(whole)
        assert tuple(ids[row] for row in plan.own[number]) == own
        borrowed = sum(sequence == number for _, _, sequence in plan.borrowed)
        assert plan.computed[number] == len(whole) - borrowed >= len(own)
    assert [ids[row] for row in plan.last] == list(whole)


@given(PREFIX, st.lists(IDS, min_size=2, max_size=6, unique=True), st.integers(1, 30))
def test_document_is_computed_twice(prefix: Ids, chunks: list[Ids], limit: int) -> None:
    texts = list(map(ChunkTokens, chunks, Contexts((5,), limit).of(chunks)))
    plan = Forward.of(prefix, texts)
    separators = len(chunks) - 1
    assert len(plan.ids) == len(prefix) + sum(map(len, chunks)) + separators
    later = Forward.of(prefix, texts[1:], (*prefix, *texts[0].context, *texts[0].token_ids))
    assert len(later.ids) == sum(map(len, chunks[1:])) + separators, "nor over two calls"


def test_row_of_another_document_is_borrowed_because_a_word_is_the_same() -> None:
    end = 77
    other = ChunkTokens((*range(200, 240), end))
    known = (1, 2, *other.token_ids)
    chunk = ChunkTokens(tuple(range(300, 340)), (end, *range(400, 430)))
    assert [row for row, *_ in Forward.of((1, 2), [chunk], known).borrowed] == [0, 1]
    behind = ChunkTokens(tuple(range(300, 340)), (*other.token_ids[-31:], 9))
    assert len(Forward.of((1, 2), [behind], known).borrowed) == 2 + 31
