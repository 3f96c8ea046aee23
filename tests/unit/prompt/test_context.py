from __future__ import annotations

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
