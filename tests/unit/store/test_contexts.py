from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from blendrag.store.contexts import Chunk, Contexts, Ids
from stores import IDENTITY

IDS = st.lists(st.integers(0, 9), min_size=1, max_size=6).map(tuple)
CHUNKS = st.lists(IDS, min_size=1, max_size=12, unique=True)


def document(contexts: Contexts, chunks: list[Ids], before: Ids = ()) -> list[Chunk]:
    return contexts.document((("", ids) for ids in chunks), Chunk("", "", before) if before else None)


@given(CHUNKS, st.integers(0, 200), st.none() | st.integers(0, 80), IDS)
def test_context_is_within_its_limit_and_the_documents_text_before_the_chunk(
    chunks: list[Ids], limit: int, room: int | None, before: Ids
) -> None:
    written = (*before, 7)
    for chunk in document(Contexts(IDENTITY, (7,), limit, room), chunks, before):
        assert len(chunk.context) <= limit
        assert room is None or not chunk.context or len(chunk.context) + len(chunk.token_ids) <= room
        assert written[len(written) - len(chunk.context) :] == chunk.context
        assert room is not None or len(chunk.context) == min(limit, len(written))
        written += (*chunk.token_ids, 7)


def test_chunk_that_comes_twice_is_prefilled_once() -> None:
    one, other = (1, 2), (3, 4)
    first, second, third = document(Contexts(IDENTITY, (), 100), [one, other, one])
    assert (first.context, second.context) == ((), one)
    assert third == first


def test_chunk_has_no_context_where_none_is_wanted() -> None:
    for chunk in document(Contexts(IDENTITY, (7,), 0), [(1,), (2,)], before=(3,)):
        assert not chunk.context and not chunk.after
        assert chunk.key == IDENTITY.chunk_key(chunk.token_ids)


@given(CHUNKS, st.integers(0, 11), st.integers(1, 8))
def test_chunks_that_have_read_other_text_have_keys_of_their_own(
    chunks: list[Ids], changed: int, limit: int
) -> None:
    """However short contexts are: KV of a context has itself read what was before it."""
    changed %= len(chunks)
    edited = [*chunks[:changed], (10, 10), *chunks[changed + 1 :]]
    contexts = Contexts(IDENTITY, (), limit)
    ones, others = document(contexts, chunks), document(contexts, edited)
    for number, (one, other) in enumerate(zip(ones, others, strict=True)):
        assert (one.key == other.key) == (number < changed)
        assert one.after == (ones[number - 1].key if number else "")
