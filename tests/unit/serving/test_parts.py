"""Texts that come and go one by one, each prefilled behind those before it in its document."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.prompt.context import Contexts, Ids
from blendrag.serving.collection import Collection
from blendrag.serving.library import Library
from blendrag.serving.parts import Parts
from blendrag.serving.prefill import PrefillReport
from blendrag.settings import Settings
from blendrag.store.catalogue import Entry
from stores import IDENTITY

TEXTS = {
    "a": ["The tram leaves the harbour at nine."],
    "b": ["It does not run on Sundays."],
    "c": ["Then a boat goes instead."],
}
ONE_FILE = dict.fromkeys("abc", "timetable.pdf")


class Registering(Library):
    """Everything but the engine's part."""

    def prefill(self, report: PrefillReport, progress: object) -> None:
        pass


@pytest.fixture
def library(tmp_path: Path, model_dir: Path) -> Iterator[Library]:
    opened = Registering(tmp_path / "kv", Settings.load(max_model_len=512))
    yield opened
    opened.close()


@pytest.fixture
def collection(library: Library) -> Collection:
    return Collection(library, "store")


def behind(library: Library) -> dict[str, str]:
    """What stands before each text."""
    decode = library.tokenizer.decode
    return {entry.text: decode(entry.context).replace("\n", "") for entry in library.catalogue.entries()}


def entry(library: Library, name: str) -> Entry:
    (found,) = (entry for entry in library.catalogue.entries() if entry.text == TEXTS[name][0])
    return found


def test_parts_of_one_source_stand_alone_or_of_two_together(library: Library, collection: Collection) -> None:
    collection.add(TEXTS, sources={"a": "one.pdf", "b": "one.pdf", "c": "other.pdf"})
    a, b, c = (TEXTS[name][0] for name in "abc")
    assert behind(library) == {a: "", b: a, c: ""}


def test_text_that_was_removed_stays_in_the_kv_of_those_behind_it(
    library: Library, collection: Collection
) -> None:
    collection.add(TEXTS, sources=ONE_FILE)
    a, b, c = (TEXTS[name][0] for name in "abc")
    assert behind(library) == {a: "", b: a, c: a + b}
    former = {name: entry(library, name).key for name in "bc"}
    collection.remove(["b"])
    assert behind(library) == {a: "", c: ""}
    assert not library.catalogue.known(former.values())
    assert entry(library, "c").state == "pending"


def test_text_that_was_replaced_stays_in_the_kv_of_those_behind_it(
    library: Library, collection: Collection
) -> None:
    collection.add(TEXTS, sources=ONE_FILE)
    collection.add({"a": ["It leaves at ten."]})
    assert behind(library) == {"It leaves at ten.": "", TEXTS["b"][0]: "", TEXTS["c"][0]: ""}


def test_crash_between_removal_and_prefill_leaves_removed_text_in_kv(
    library: Library, collection: Collection, model_dir: Path
) -> None:
    collection.add(TEXTS, sources=ONE_FILE)
    library.catalogue.release(collection._owner("a"))  # and no more: here the process ends
    library.close()
    again = Library(library.root, library.settings)
    assert set(again.catalogue.outdated()) == {collection._owner("b"), collection._owner("c")}
    again._detach()
    assert not any(behind(again).values())
    assert not again.catalogue.outdated()
    again.close()


def test_text_added_again_by_itself_loses_its_context(library: Library, collection: Collection) -> None:
    collection.add(TEXTS, sources=ONE_FILE)
    before = library.catalogue.entries()
    collection.add({"b": TEXTS["b"]}, sources=ONE_FILE)
    assert library.catalogue.entries() == before


def test_evicted_text_added_again_is_not_wanted(library: Library, collection: Collection) -> None:
    collection.add(TEXTS, sources=ONE_FILE)
    library.catalogue.mark([entry(library, "b").key], "evicted")
    collection.add(TEXTS, sources=ONE_FILE)
    assert entry(library, "b").state == "pending"


def test_sync_leaves_texts_behind_what_they_do_not_follow(library: Library, collection: Collection) -> None:
    collection.add(TEXTS)
    assert not any(behind(library).values())
    assert collection.sync(TEXTS, sources=ONE_FILE).changed == 2
    assert collection.sync(TEXTS, sources=ONE_FILE).unchanged == 3
    a, _, c = (TEXTS[name][0] for name in "abc")
    report = collection.sync({"a": TEXTS["a"], "c": TEXTS["c"]}, sources=ONE_FILE)
    assert (report.removed, report.changed, report.unchanged) == (1, 1, 1)
    assert behind(library) == {a: "", c: a}


def test_removal_of_one_of_two_copies_takes_the_others_context(
    library: Library, collection: Collection
) -> None:
    """As when a changed file is added under new ids and its former ids are removed."""
    collection.add(TEXTS, sources=ONE_FILE)
    before = library.catalogue.entries()
    copies = {f"{name}2": texts for name, texts in TEXTS.items()}
    collection.add(copies, sources=dict.fromkeys(copies, "timetable.pdf"))
    assert library.catalogue.entries() == before
    collection.remove(TEXTS)
    assert library.catalogue.entries() == before


def test_collection_forgets_all_at_once_and_leaves_something(
    library: Library, collection: Collection
) -> None:
    collection.add(TEXTS, sources=ONE_FILE)
    collection.clear()
    assert not library.catalogue.entries() and not library.catalogue.outdated()


def test_forms_of_a_text_stand_behind_other_forms(library: Library, collection: Collection) -> None:
    texts = {name: [f"file: t.pdf {text}", text] for name, (text,) in TEXTS.items()}
    collection.add(texts, sources=ONE_FILE)
    with_metadata, bare = zip(*texts.values(), strict=True)
    found = behind(library)
    assert [found[text] for text in bare] == ["", bare[0], bare[0] + bare[1]]
    assert found[with_metadata[2]] == with_metadata[0] + with_metadata[1]


WORDS = st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=2, unique=True)


@given(st.lists(st.tuples(WORDS, st.sampled_from(["one", "two", ""])), max_size=8), st.integers(0, 12))
def test_owner_stands_behind_text_of_which_nothing_is_noted(
    given: list[tuple[list[str], str]], limit: int
) -> None:
    """Each owner has letters of its own: so whose text a context is made of can be seen in it."""

    def encode(text: str) -> Ids:
        return tuple(map(int, text.split("-")))

    documents = {
        str(at): ["-".join(str(100 * (at + 1) + ord(letter)) for letter in text) for text in texts]
        for at, (texts, _) in enumerate(given)
    }
    sources = {str(at): source for at, (_, source) in enumerate(given) if source}
    for part in Parts(IDENTITY, Contexts((), limit), encode).of(documents, sources):
        seen = {str(token // 100 - 1) for chunk in part.chunks for token in chunk.context}
        assert seen <= set(part.behind)
        assert all(sources[one] == sources[part.owner] for one in seen)
        assert part.owner not in part.behind


def test_text_that_comes_again_in_its_source_is_prefilled_again(
    library: Library, collection: Collection
) -> None:
    collection.add({**TEXTS, "d": TEXTS["b"]}, sources=ONE_FILE | {"d": "timetable.pdf"})
    collection.remove(["b"])
    assert behind(library)[TEXTS["b"][0]] == TEXTS["a"][0]
    collection.remove(["a"])
    assert behind(library)[TEXTS["b"][0]] == ""
