"""Texts that clients mark in their prompts. No engine is started here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from blendrag.serving import marked
from blendrag.serving.collection import Collection
from blendrag.serving.library import Library
from blendrag.serving.marked import COLLECTION, LEAST_TOKENS
from blendrag.settings import Settings


@pytest.fixture
def library(tmp_path: Path, model_dir: Path) -> Iterator[Library]:
    opened = Library(tmp_path / "kv", Settings.load(max_model_len=512))
    yield opened
    opened.close()


def page(name: str) -> str:
    return f"The city of {name} has many streets. " + "A river runs through it from north to south. " * 8


def kept(library: Library) -> set[str]:
    """Names in the texts."""
    return {entry.text.split()[3] for entry in library.catalogue.entries()}


def test_marked_text_is_found_in_the_next_prompt(library: Library) -> None:
    prompt = f"Read:\n{page('Bergen')}\n\nWhere?"
    assert library.plan(prompt).cached_tokens == 0
    library.marked.keep([f"  {page('Bergen')}\n", page("Bergen")])
    assert library.plan(prompt).cached_tokens > LEAST_TOKENS
    assert len(Collection(library, COLLECTION).ids()) == 1


def test_text_of_a_few_words_is_no_document(library: Library) -> None:
    library.marked.keep(["Be helpful.", "", " \n"])
    assert library.catalogue.entries() == []


def test_text_that_somebody_owns_is_not_kept_twice(library: Library) -> None:
    Collection(library, "handbook").library.texts.register({"a": [page("Bergen")]})
    library.marked.keep([page("Bergen")])
    assert Collection(library, COLLECTION).ids() == set()


def test_least_recently_marked_text_makes_room(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    one = len(library.tokenizer(page("Bergen")).input_ids)
    monkeypatch.setattr(marked, "MOST_TOKENS", 2 * one + one // 2)
    library.marked.keep([page("Bergen"), page("Porto")])
    library.marked.keep([page("Bergen")])
    library.marked.keep([page("Gdynia")])
    assert kept(library) == {"Bergen", "Gdynia"}
    library.marked.keep([page(name) for name in ("Bergen", "Porto", "Oslo", "Rome")])
    assert kept(library) == {"Oslo", "Rome"}


def test_limit_holds_for_texts_of_an_earlier_process(
    library: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library.marked.keep([page("Bergen"), page("Porto")])
    library.close()
    one = len(library.tokenizer(page("Bergen")).input_ids)
    monkeypatch.setattr(marked, "MOST_TOKENS", 2 * one + one // 2)
    again = Library(tmp_path / "kv", Settings.load(max_model_len=512))
    again.marked.keep([page("Gdynia")])
    assert "Gdynia" in kept(again) and len(kept(again)) == 2
    again.close()


def test_text_that_was_forgotten_is_kept_when_it_is_marked_again(library: Library) -> None:
    library.marked.keep([page("Bergen")])
    Collection(library, COLLECTION).clear()
    assert kept(library) == set()
    library.marked.keep([page("Bergen")])
    assert kept(library) == {"Bergen"}
