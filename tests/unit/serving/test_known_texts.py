"""Texts in memory follow a catalogue that other processes change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.serving.library import KnownTexts
from blendrag.store import catalogue as catalogue_module
from blendrag.store.catalogue import Catalogue
from stores import IDENTITY

TEXTS = {f"k{n}": f"Text number {n}. " * 4 for n in range(6)}


def register(catalogue: Catalogue, owner: str, *keys: str) -> None:
    catalogue.register(owner, [(key, TEXTS[key], (1, 2, 3)) for key in keys])


def known(texts: KnownTexts) -> dict[str, str | None]:
    """Sources by key."""
    recogniser = texts.now()
    found = {key: recogniser.known(key) for key in TEXTS}
    assert len(recogniser) == sum(text is not None for text in found.values())
    return {key: text.source for key, text in found.items() if text is not None}


@pytest.fixture
def pair(tmp_path: Path, tokenizer: Any) -> Iterator[tuple[Catalogue, KnownTexts]]:
    """A catalogue, and texts that follow it over another connection."""
    ours, theirs = Catalogue.open(tmp_path, IDENTITY), Catalogue.open(tmp_path, IDENTITY)
    yield theirs, KnownTexts(ours, tokenizer)
    ours.close()
    theirs.close()


KEYS = st.lists(st.sampled_from(sorted(TEXTS)), max_size=4, unique=True)
STEPS = st.tuples(st.sampled_from(["one", "two"]), KEYS, st.booleans())


@given(st.lists(STEPS, max_size=12), st.sampled_from([2, 10_000]))
def test_process_sees_what_another_one_changes(
    tokenizer: Any, steps: list[tuple[str, list[str], bool]], remembered: int
) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalogue_module, "_REMEMBERED", remembered)
        ours, theirs = (Catalogue.open(Path(folder), IDENTITY) for _ in range(2))
        texts = KnownTexts(ours, tokenizer)
        for owner, keys, looks in steps:
            register(theirs, owner, *keys)
            if looks:
                assert known(texts) == known(KnownTexts(ours, tokenizer))
        assert known(texts) == known(KnownTexts(ours, tokenizer))
        assert set(known(texts)) == ours.known()
        ours.close()
        theirs.close()


def test_only_the_text_that_came_is_read(
    pair: tuple[Catalogue, KnownTexts], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, texts = pair
    register(theirs, "one", "k0", "k1")
    assert known(texts) == {"k0": "one", "k1": "one"}
    monkeypatch.setattr(Catalogue, "entries", lambda _: pytest.fail("all texts were read again"))
    register(theirs, "two", "k2")
    theirs.release("one")
    assert known(texts) == {"k2": "two"}
    register(theirs, "three", "k2")
    theirs.release("two")
    assert known(texts) == {"k2": "three"}, "a document that has left gives its name to nothing"
    assert texts.now() is texts.now()
