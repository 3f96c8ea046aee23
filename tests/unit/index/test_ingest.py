"""What an index holds after lists of documents: what they name, whole, once, with the KV that was there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.index.index import BlendIndex
from blendrag.index.ingest import LEAVING, DocumentPipeline, IngestReport
from blendrag.index.ledger import Ledger
from blendrag.index.loaders import Document
from blendrag.progress import SILENT
from blendrag.store.catalogue import Catalogue
from blendrag.store.contexts import Chunk, Contexts
from stores import IDENTITY, rows


class Killed(BaseException):
    pass


@dataclass
class Life:
    """A process that is killed before it writes for the last time; then it writes no more."""

    writes: float = float("inf")

    def write(self) -> None:
        if self.writes <= 0:
            raise Killed
        self.writes -= 1


class MortalLedger(Ledger):
    life = Life()

    def _execute(self, sql: str, values: Sequence[object] = ()) -> list[Any]:
        if not sql.startswith("SELECT"):
            self.life.write()
        return super()._execute(sql, values)


class MortalCatalogue(Catalogue):
    life = Life()

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        self.life.write()
        with super()._transaction() as db:
            yield db


@dataclass
class Vectors:
    """A vector store's rows in memory, which outlives a process."""

    life: Life = field(default_factory=Life)
    rows: dict[str, list[str]] = field(default_factory=dict)

    def put(self, source: str, pieces: Sequence[tuple[str, str]], _: object = None) -> None:
        self.life.write()
        self.rows[source] = [text for _, text in pieces]

    def delete(self, source: str) -> None:
        self.life.write()
        self.rows.pop(source, None)

    def incomplete(self, expected: Mapping[str, int]) -> set[str]:
        return {source for source, rows in expected.items() if len(self.rows.get(source, ())) < rows}


def at_stops(text: str) -> list[Chunk]:
    return Contexts(IDENTITY).document((part, tuple(part.encode())) for part in text.split(".") if part)


class Index:
    """An index of real parts but for vectors and KV. Of KV, it knows for which texts it is there."""

    def __init__(self, root: Path) -> None:
        self.root, self.vectors, self.kv = root, Vectors(), set[str]()
        self.open()

    def open(self) -> None:
        """As a new process finds what the last one left."""
        self.life = self.vectors.life = Life()
        self.ledger, self.catalogue = MortalLedger(self.root), MortalCatalogue.open(self.root, IDENTITY)
        self.ledger.life = self.catalogue.life = self.life
        self.ledger._db.execute("PRAGMA synchronous=OFF")  # processes are killed here, not machines
        self.catalogue.release(LEAVING)
        self.kv -= set(self.catalogue.doomed())

    def close(self) -> None:
        self.ledger.close()
        self.catalogue.close()

    def take(self, items: Any) -> tuple[IngestReport, list[str]]:
        """Take documents. Returns the texts that had to be computed, too."""
        report = IngestReport()
        parts: Any = (self.root, "f", at_stops, self.ledger, self.vectors, self.catalogue)
        self.kv -= set(DocumentPipeline(*parts).take(items, report, SILENT)) - self.catalogue.known()
        pending = self.catalogue.pending()
        for chunk in pending:
            self.kv.add(chunk.key)
            self.catalogue.mark_ready(chunk.key, 1)
        return report, [chunk.text for chunk in pending]

    def texts(self) -> dict[str, str]:
        """Texts by source, as every part has them."""
        assert set(self.vectors.rows) == self.ledger.sources() == set(self.catalogue.owners())
        for source, parts in self.vectors.rows.items():
            assert self.catalogue.texts_of(source) == set(parts)
        assert self.kv == self.catalogue.known()
        return {source: ".".join(parts) for source, parts in self.vectors.rows.items()}


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    with closing(Index(tmp_path)) as opened:
        yield opened


def pages(*texts: str, first: int = 0) -> list[Any]:
    """Of a file, as LangChain's loaders give them."""
    return [
        SimpleNamespace(page_content=text, metadata={"source": "a.pdf", "page": number})
        for number, text in enumerate(texts, first)
    ]


def parts(*texts: str, source: str = "s") -> list[Document]:
    return [Document(text, source) for text in texts]


# -- lists ------------------------------------------------------------------------------------------------

ROWS = st.lists(st.sampled_from(["one", "two", "three", "four", "one.two", " "]), max_size=6)
LISTS = st.fixed_dictionaries({}, optional={"s": ROWS, "t": ROWS})


def documents(lists: dict[str, list[str]]) -> list[Document]:
    return [one for source, texts in lists.items() for one in parts(*texts, source=source)]


def held(lists: dict[str, list[str]]) -> dict[str, str]:
    """What these lists say, by source."""
    return {
        source if number == 1 else f"{source}#{number}": text
        for source, texts in lists.items()
        for number, text in enumerate(dict.fromkeys(text for text in texts if text.strip()), 1)
    }


def pieces(texts: Iterable[str]) -> set[str]:
    return {part for text in texts for part in text.split(".")}


@given(st.lists(LISTS, min_size=1, max_size=6))
def test_list_is_all_of_its_sources_and_computes_only_what_is_new(steps: list[dict[str, list[str]]]) -> None:
    now: dict[str, list[str]] = {}
    with TemporaryDirectory() as folder, closing(Index(Path(folder))) as index:
        for lists in steps:
            named = {source: texts for source, texts in lists.items() if texts}
            before, now = held(now), now | named
            after = held(now)
            report, computed = index.take(documents(lists))
            assert index.texts() == after
            assert sorted(computed) == sorted(pieces(after.values()) - pieces(before.values()))
            assert report.added == len(after.keys() - before.keys())
            assert report.removed == len(before.keys() - after.keys())
            report, computed = index.take(documents(lists))
            assert (report.added, report.changed, report.removed, computed) == (0, 0, 0, [])


@pytest.mark.parametrize(
    ("first", "killed"),
    [
        (["one", "two", "three"], ["one"]),
        (["one"], ["new", "one", "two.one"]),
        (["one", "two", "three"], ["three", "one", "two"]),
        (["one", "two", "three"], ["new", "three"]),
    ],
)
@pytest.mark.parametrize("last", [["one"], ["new", "two"], [" "]])
def test_kill_anywhere_leaves_nothing_that_the_next_list_does_not_have(
    first: list[str], killed: list[str], last: list[str]
) -> None:
    for writes in count():
        with TemporaryDirectory() as folder, closing(Index(Path(folder))) as index:
            index.take(parts(*first))
            index.life.writes = writes
            try:
                index.take(parts(*killed))
            except Killed:
                index.close()
                index.open()
            else:
                assert writes > 5
                break
            assert LEAVING not in index.catalogue.owners()
            index.take(parts(*last))
            assert index.texts() == held({"s": last})
            assert index.take(parts(*last))[1] == []


def test_pages_that_are_not_in_a_list_any_more_are_removed(index: Index) -> None:
    index.take(pages("one", "two", "three"))
    report, computed = index.take(pages("new", "one", "two"))
    assert (report.changed, computed) == (3, ["new"])
    report, _ = index.take(pages("one"))
    assert (report.removed, index.texts()) == (2, {"a.pdf#page=0": "one"})
    index.take([Document("whole", "a.pdf")])
    assert index.texts() == {"a.pdf": "whole"}


def test_document_alone_replaces_only_itself(index: Index) -> None:
    for page in pages("one", "two", "three"):
        index.take(page)
    index.take(Document("four", "a.pdf"))
    index.take(pages("new", first=1)[0])
    assert set(index.texts().values()) == {"one", "new", "three", "four"}
    assert index.take(pages("one"))[0].removed == 3


def test_documents_of_the_user_are_no_parts_whatever_they_are_called(index: Index) -> None:
    own = [Document("one", "s#2"), Document("two", "s#page=1"), Document("three", "s/t")]
    index.take(own)
    index.take(parts("a"))
    by_id = SimpleNamespace(page_content="b", metadata={"source": "s", "page": 3}, id="s#7")
    index.take([by_id])
    index.take(parts("c"))
    assert index.texts() == {"s#2": "one", "s#page=1": "two", "s/t": "three", "s#7": "b", "s": "c"}
    index.take([Document("d", "s, page 4", part_of="s")])
    assert "s" not in index.texts() and len(index.texts()) == 5


def test_file_and_documents_of_one_source_are_told_apart(index: Index, folder: Path) -> None:
    file = folder / "a.txt"
    file.write_text("whole")
    items = [file, *parts("one", "two", source=str(file))]
    index.take(items)
    assert list(index.texts().values()) == ["whole", "one", "two"]
    report, computed = index.take(items)
    assert (report.unchanged, report.removed, computed) == (3, 0, [])
    report, computed = index.take(file)
    assert (index.texts(), report.removed, computed) == ({str(file): "whole"}, 2, [])


def test_documents_of_a_folder_that_cannot_be_listed_stay(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "docs" / "closed"
    closed.mkdir(parents=True)
    (closed / "one.txt").write_text("one")
    (closed.parent / "two.txt").write_text("two")
    index.take([closed.parent])
    listed = os.listdir

    def refusing(path: Any = ".") -> list[str]:
        if Path(path) == closed:
            raise PermissionError
        return listed(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", refusing)
        report, _ = index.take([closed.parent])
    assert report.removed == 0 and len(index.texts()) == 2 and report.skipped
    (closed / "one.txt").unlink()
    assert index.take([closed.parent])[0].removed == 1


def test_folder_whose_name_is_no_valid_text_is_ingested_twice_as_one(index: Index, folder: Path) -> None:
    named = folder / os.fsdecode(b"caf\xe9")
    named.mkdir()
    for text in ("one", "two"):
        (named / f"{text}.txt").write_text(text)
    index.take(named)
    (named / "one.txt").unlink()
    report, computed = index.take(named)
    assert (report.unchanged, report.added, report.removed, computed) == (1, 0, 1, [])


def test_iterator_is_a_list(index: Index) -> None:
    index.take(iter(parts("one", "two")))
    assert index.take(iter(parts("two")))[0].removed == 1
    assert index.texts() == {"s": "two"}


def test_parts_that_a_former_version_did_not_note_are_noted(index: Index) -> None:
    index.take(parts("one", "two", "three"))
    index.ledger._execute("UPDATE documents SET part_of = NULL")
    assert index.take(parts("one", "two"))[0].unchanged == 2
    index.take(parts("one"))
    assert index.texts() == {"s": "one", "s#3": "three"}


@pytest.fixture
def releases(folder: Path) -> Path:
    """A link to the first of two, each with a file of its own."""
    for name, own in (("first", "old"), ("second", "new")):
        (folder / name).mkdir()
        (folder / name / "a.txt").write_text(f"both.{name}")
        (folder / name / f"{own}.txt").write_text(own)
    (folder / "current").symlink_to("first")
    return folder


@pytest.mark.parametrize(("name", "left"), [(".", {"a.txt", "new.txt"}), ("a.txt", {"a.txt"})])
def test_link_that_is_switched_names_the_same_documents(
    index: Index, releases: Path, name: str, left: set[str]
) -> None:
    link = releases / "current"
    index.take(link / name)
    link.unlink()
    link.symlink_to("second")
    report, computed = index.take(link / name)
    assert set(index.texts()) == {str(link / file) for file in left}
    assert index.texts()[str(link / "a.txt")] == "both.second"
    assert report.changed == 1 and "both" not in computed


def test_documents_by_the_real_path_of_a_folder_give_way_to_those_by_the_link(
    index: Index, releases: Path
) -> None:
    index.take(releases / "first")
    report, computed = index.take(releases / "current")
    assert {Path(source).parent.name for source in index.texts()} == {"current"}
    assert (report.added, report.removed, computed) == (2, 2, [])


def test_documents_that_are_not_below_what_is_ingested_stay(index: Index, releases: Path) -> None:
    """Though they are behind a link into it: it may be hidden there, or have another name."""
    (releases / "first" / ".hidden").mkdir()
    (releases / "first" / ".hidden" / "b.txt").write_text("hidden")
    (releases / "links").mkdir()
    (releases / "links" / "a.txt").symlink_to(releases / "first" / "a.txt")
    (releases / "links" / "hidden").symlink_to(releases / "first" / ".hidden")
    targets = [
        releases / "links" / "hidden",
        releases / "links",
        releases / "first",
        releases / "links" / "a.txt",
    ]
    for target in targets:
        index.take(target)
    assert len(index.texts()) == 4
    for target in targets:
        report, _ = index.take(target)
        assert (report.added, report.changed, report.removed) == (0, 0, 0)


@pytest.mark.parametrize("lost", [["a"], ["a", "b"]])
def test_rows_that_the_vector_store_has_lost_are_written_again_without_a_prefill(
    index: Index, lost: list[str]
) -> None:
    documents = [Document("one.two", "a"), Document("two.three", "b")]
    index.take(documents)
    for source in lost:
        del index.vectors.rows[source]
    report, computed = index.take(documents)
    assert index.texts() == {"a": "one.two", "b": "two.three"}
    assert (report.changed, report.unchanged, computed) == (len(lost), 2 - len(lost), [])


# -- opening ----------------------------------------------------------------------------------------------


def test_what_a_killed_ingest_has_left_goes_when_the_index_is_opened(tmp_path: Path, model_dir: Path) -> None:
    with BlendIndex.open(tmp_path, model=str(model_dir)) as opened:
        opened._library.catalogue.register(LEAVING, rows("left"))
    with BlendIndex.open(tmp_path, model=str(model_dir)) as opened:
        catalogue = opened._library.catalogue
        assert (catalogue.owners(), catalogue.doomed()) == ({}, ["left"])
