from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from blendrag.prompt.context import Contexts, Ids

IDS = st.lists(st.integers(0, 9), min_size=1, max_size=6).map(tuple)
CHUNKS = st.lists(IDS, max_size=12, unique=True)


@given(CHUNKS, st.integers(0, 200), st.none() | st.integers(0, 80), IDS)
def test_context_is_longer_than_allowed_or_no_text_of_the_document_before_the_chunk(
    chunks: list[Ids], limit: int, room: int | None, before: Ids
) -> None:
    written = before
    for ids, context in zip(chunks, Contexts((7,), limit, room).of(chunks, before), strict=True):
        assert len(context) <= limit
        assert room is None or not context or len(context) + len(ids) <= room
        assert written[len(written) - len(context) :] == context
        assert room is not None or len(context) == min(limit, len(written))
        written += (*ids, 7)


def test_chunk_that_comes_twice_is_prefilled_twice() -> None:
    one, other = (1, 2), (3, 4)
    contexts = Contexts((), 100).of([one, other, one])
    assert contexts == [(), one, ()]


def test_chunk_has_a_context_though_none_is_wanted() -> None:
    assert Contexts((7,), 0).of([(1,), (2,)], before=(3,)) == [(), ()]


@given(CHUNKS, st.integers(0, 40), st.none() | st.integers(0, 30), IDS)
def test_one_chunk_has_another_context_than_in_its_whole_document(
    chunks: list[Ids], limit: int, room: int | None, last: Ids
) -> None:
    contexts = Contexts((7,), limit, room)
    if last in chunks:
        return
    context, count = contexts.last(chunks, last)
    assert context == contexts.of([*chunks, last])[-1]
    assert contexts.last(chunks[len(chunks) - count :], last)[0] == context
    assert count == 0 or contexts.last(chunks[len(chunks) - count + 1 :], last)[0] != context


@dataclass(frozen=True)
class Chunk:
    token_ids: Ids
    context: Ids = ()


@given(st.integers(0, 3), st.integers(1, 12), st.randoms(use_true_random=False))
def test_chunks_of_two_documents_take_turns_and_every_context_is_computed(
    others: int, length: int, random: object
) -> None:
    """The chunks of each document are in order; those of several are mixed."""
    contexts, documents = Contexts((7,), 20), []
    for name in range(1 + others):
        ids = [(100 + name, 200 + number, number) for number in range(length)]
        documents.append([Chunk(*pair) for pair in zip(ids, contexts.of(ids), strict=True)])
    mixed = [chunk for row in zip(*documents, strict=True) for chunk in row]
    assert contexts.in_order(mixed) == [chunk for document in documents for chunk in document]
    random.shuffle(mixed)  # type: ignore[attr-defined]
    assert sorted(contexts.in_order(mixed), key=repr) == sorted(mixed, key=repr)
