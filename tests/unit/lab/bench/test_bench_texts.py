"""Where the benchmark's text comes from."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.errors import ConfigError
from blendrag.lab.texts import cut_chunks, installed_texts


def encode(text: str) -> list[int]:
    return [ord(sign) for sign in text]


@given(st.lists(st.text("abcd", max_size=40), max_size=8), st.integers(1, 10), st.integers(1, 12))
def test_chunks_are_exact_different_and_from_the_texts(texts: list[str], size: int, most: int) -> None:
    try:
        chunks = cut_chunks(texts, encode, size, least=1, most=most)
    except ConfigError:
        assert all(len(text) < size for text in texts)
        return
    assert len(chunks) == len(set(chunks)) <= most
    assert all(len(chunk) == size for chunk in chunks)
    assert all(any("".join(map(chr, chunk)) in text for text in texts) for chunk in chunks)


def test_every_text_gives_its_first_chunk_before_any_gives_its_second() -> None:
    chunks = cut_chunks(["aabbcc", "xxyy"], encode, 2, least=1, most=4)
    assert ["".join(map(chr, chunk)) for chunk in chunks] == ["aa", "xx", "bb", "yy"]


def test_too_little_text_says_how_much_there_is() -> None:
    with pytest.raises(ConfigError, match="1 different chunks of 2 tokens, and 3 are needed"):
        cut_chunks(["aaaa", "aa", "b"], encode, 2, least=3, most=12)


def test_built_in_text_is_the_same_each_time_and_enough_for_the_default_bench() -> None:
    texts = [text for text in islice(installed_texts(), 150) if len(text) > 4000]
    assert len(texts) >= 6
    assert list(islice(installed_texts(), 20)) == list(islice(installed_texts(), 20))
