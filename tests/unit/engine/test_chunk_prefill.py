"""What a forward at ingest computes, and what it borrows from rows that are known."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from blendrag.engine.ingest.chunk_prefill import ChunkTokens, Forward, Known
from blendrag.store.contexts import Contexts, Ids
from stores import IDENTITY

IDS = st.lists(st.integers(0, 3), min_size=1, max_size=7).map(tuple)
PREFIX = st.lists(st.integers(7, 9), max_size=3).map(tuple)
NAMES = st.sampled_from("abc")
CHUNKS = st.lists(
    st.builds(ChunkTokens, NAMES, IDS, st.just(()) | IDS, st.just("") | NAMES), min_size=1, max_size=6
)


@given(PREFIX, CHUNKS, st.lists(st.integers(0, 3), max_size=9).map(tuple), st.booleans())
def test_chunk_stands_behind_its_own_tokens(
    prefix: Ids, chunks: list[ChunkTokens], last: Ids, first: bool
) -> None:
    known = () if first else prefix + last
    plan = Forward.of(prefix, chunks, Known(known, "a"))
    ids = [*known, *plan.ids]
    found: list[dict[int, int]] = [{} for _ in chunks]
    for row, position, sequence in plan.borrowed:
        found[sequence][position] = ids[row]
    for id, position, sequence in zip(plan.ids, plan.positions, plan.sequences, strict=True):
        assert position not in found[sequence], "computed, and borrowed too"
        found[sequence][position] = id
    for number, (_, own, context, _) in enumerate(chunks):
        whole = (*prefix, *context, *own)
        assert [found[number][position] for position in range(len(found[number]))] == list(whole)
        assert plan.whole[number] == len(whole)
        assert tuple(ids[row] for row in plan.own[number]) == own
        borrowed = sum(sequence == number for _, _, sequence in plan.borrowed)
        assert plan.computed[number] == len(whole) - borrowed >= len(own)
    assert [ids[row] for row in plan.last] == list(whole)


@given(PREFIX, st.lists(IDS, min_size=2, max_size=6, unique=True), st.integers(1, 30))
def test_document_is_computed_once(prefix: Ids, chunks: list[Ids], limit: int) -> None:
    made = Contexts(IDENTITY, (5,), limit).document(("", ids) for ids in chunks)
    texts = [ChunkTokens(one.key, one.token_ids, one.context, one.after) for one in made]
    plan = Forward.of(prefix, texts)
    separators = len(chunks) - 1
    assert len(plan.ids) == len(prefix) + sum(map(len, chunks)) + separators
    known = Known((*prefix, *texts[0].context, *texts[0].token_ids), texts[0].key)
    later = Forward.of(prefix, texts[1:], known)
    assert len(later.ids) == sum(map(len, chunks[1:])) + separators, "nor over two calls"
    other = ChunkTokens("other", (6, 6))
    mixed = Forward.of(prefix, [texts[0], other, *texts[1:]])
    assert len(mixed.ids) == len(plan.ids) + 2, "nor with another's chunk between"


def test_row_of_another_document_is_not_borrowed_though_its_words_are_the_same() -> None:
    other = ChunkTokens("other", tuple(range(200, 240)))
    known = Known((1, 2, *other.token_ids), "other")
    behind = ChunkTokens("one", tuple(range(300, 340)), (*other.token_ids[-31:], 9), "other")
    assert len(Forward.of((1, 2), [behind], known).borrowed) == 2 + 31
    for after in ("", "another"):
        apart = behind._replace(after=after)
        assert [row for row, *_ in Forward.of((1, 2), [apart], known).borrowed] == [0, 1]
    unnamed = other._replace(key="")
    plan = Forward.of((1, 2), [unnamed, behind._replace(after="")])
    assert [sequence for *_, sequence in plan.borrowed] == [1, 1], "the prefix only"
