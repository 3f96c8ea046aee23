from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.errors import SourceError
from blendrag.index.formats import READERS
from blendrag.index.loaders import Document, Loaded, Skipped, load_sources
from office_files import archive, pdf


def documents(loaded: list[Loaded]) -> list[Document]:
    return [each for each in loaded if isinstance(each, Document)]


def reasons(loaded: list[Loaded]) -> dict[str, str]:
    return {Path(each.source).name: each.reason for each in loaded if isinstance(each, Skipped)}


def test_folder_without_a_document_says_what_was_wrong_with_its_files(folder: Path) -> None:
    with pytest.raises(SourceError, match="no documents in folder"):
        list(load_sources(folder))
    (folder / "empty.md").touch()
    with pytest.raises(SourceError, match=r"empty\.md.*was skipped: empty file"):
        list(load_sources(folder))


def test_one_unusable_file_does_not_stop_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "good.txt").write_text("Travel is approved by the team lead.")
    (folder / "empty.txt").touch()
    (folder / "blank.txt").write_text(" \n\t\n")
    (folder / "binary.txt").write_bytes(bytes(range(256)) * 2)
    (folder / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (folder / "broken.pdf").write_bytes(b"%PDF-1.4 and then nothing")
    (folder / "dangling.txt").symlink_to(folder / "nowhere")
    (folder / "big.txt").write_text("x" * 1001)
    (folder / "~$report.docx").write_bytes(b"\x03Anna" + bytes(157))  # passed over: Office has it open
    os.mkfifo(folder / "pipe.txt")
    with (folder / "disk.img").open("wb") as file:
        file.truncate(1 << 40)  # which nobody may read whole
    monkeypatch.setattr("blendrag.index.loaders.MAX_FILE_BYTES", 1000)
    loaded = list(load_sources(folder))
    assert [document.text for document in documents(loaded)] == ["Travel is approved by the team lead."]
    found = reasons(loaded)
    assert found.pop("broken.pdf").startswith("broken PDF")
    assert found == {
        "empty.txt": "empty file",
        "blank.txt": "no text in it",
        "binary.txt": "binary file (a zero byte at 0)",
        "image.png": "no reader for .png files",
        "disk.img": "no reader for .img files",
        "dangling.txt": "unreadable (No such file or directory)",
        "big.txt": "larger than the limit of 1,000 bytes (1,001)",
        "pipe.txt": "not a regular file",
    }


def test_archive_under_any_suffix_is_skipped_and_a_pdf_under_any_is_read(folder: Path) -> None:
    (folder / "plan.txt").write_bytes(pdf("The crane lifts 40 t."))
    (folder / "plan.bin").write_bytes(pdf("The barge carries gravel."))
    (folder / "notes.md").write_bytes(archive({"a.txt": "text"}))
    (folder / "late.txt").write_bytes(b"a" * 70_000 + b"\0a")
    loaded = list(load_sources(folder))
    assert {document.text for document in documents(loaded)} == {
        "The crane lifts 40 t.",
        "The barge carries gravel.",
    }
    assert reasons(loaded) == {
        "notes.md": "ZIP archive that is neither Word, PowerPoint, Excel nor EPUB",
        "late.txt": "binary file (a zero byte at 70,000)",
    }


@pytest.mark.parametrize(
    "failure", [RecursionError("too deep"), MemoryError(), AssertionError("inside"), KeyError("x")]
)
def test_file_that_a_reader_fails_on_is_skipped_and_the_walk_goes_on(
    failure: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: bytes) -> Any:
        raise failure

    monkeypatch.setitem(READERS, ".tex", fails)
    (folder / "a.tex").write_text("text")
    (folder / "b.txt").write_text("text")
    skipped, document = load_sources(folder)
    assert isinstance(skipped, Skipped) and type(failure).__name__ in skipped.reason
    assert isinstance(document, Document) and document.text == "text"


def test_pipe_or_socket_named_directly_is_refused_and_does_not_hang(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "s"))
        for name in ("pipe", "s"):
            with pytest.raises(SourceError, match="not a regular file"):
                list(load_sources(folder / name))


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root reads everything; nobody does not."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_forbidden_file_may_come_back_and_is_marked_transient() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "good.txt").write_text("text")
        (folder / "secret.txt").write_text("text")
        (folder / "secret.txt").chmod(0)
        list(load_sources(folder))  # imports what it needs, as long as it may
        with as_nobody():
            skipped = [each for each in load_sources(folder) if isinstance(each, Skipped)]
    assert [(each.reason, each.transient) for each in skipped] == [("unreadable (Permission denied)", True)]


def test_file_that_is_reached_in_several_ways_is_read_once(folder: Path) -> None:
    (folder / "a.txt").write_text("text")
    (folder / "b.txt").symlink_to(folder / "a.txt")
    (folder / "again").symlink_to(folder)
    assert len(list(load_sources([folder, folder / "a.txt", folder / "b.txt"]))) == 1


def test_step_up_behind_a_link_leads_to_where_the_link_does(folder: Path) -> None:
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "a.txt").write_text("meant")
    (folder / "a.txt").write_text("not meant")
    (folder / "link").symlink_to("deep/er")
    (document,) = documents(list(load_sources(f"{folder}/link/../a.txt")))
    assert (document.text, document.source) == ("meant", str(folder / "deep" / "a.txt"))


def test_relative_path_in_a_folder_that_was_deleted_is_a_user_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    folder.rmdir()
    for name in ("a", "."):
        with pytest.raises(SourceError, match=f"no such file or folder: '{name}'"):
            load_sources(Path(name))


def test_working_folder_is_named_as_the_shell_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "real").mkdir()
    (folder / "real" / "a.txt").write_text("text")
    (folder / "link").symlink_to("real")
    monkeypatch.chdir(folder / "link")
    for shell, name in (("link", "link"), ("", "real")):  # an old PWD counts for nothing
        monkeypatch.setenv("PWD", str(folder / shell))
        for path in (".", "./a.txt"):
            (document,) = documents(list(load_sources(path)))
            assert document.source == str(folder / name / "a.txt")


def test_index_inside_the_folder_is_not_ingested(folder: Path) -> None:
    (folder / "a.txt").write_text("text")
    (folder / "index").mkdir()
    (folder / "index" / "notes.txt").write_text("not a document")
    loaded = documents(list(load_sources(folder, exclude=[folder / "index"])))
    assert [document.text for document in loaded] == ["text"]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("handbook/travl.md", "/handbook/travel.md"),
        ("handbook/TRAVEL.MD", "/handbook/travel.md"),
        ("handbok/deep/file.md", "/handbook"),
    ],
)
def test_mistyped_path_is_corrected_and_not_taken_for_a_text(folder: Path, wrong: str, right: str) -> None:
    (folder / "travel.md").write_text("text")
    with pytest.raises(SourceError, match=f"did you mean '.*{right}'"):
        load_sources(str(folder.parent / wrong))


def test_only_who_may_have_meant_a_text_is_told_how_to_give_one(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"'travel'; a text is given as Document"):
        load_sources("travel")
    with pytest.raises(SourceError) as from_shell:
        load_sources(tmp_path / "travel")
    assert "Document" not in str(from_shell.value)


@pytest.mark.parametrize("address", ["https://a.test/fees.html", "file:///etc/fees", Path("s3://b/fees.md")])
def test_address_is_refused_with_what_to_do(address: str | Path) -> None:
    with pytest.raises(SourceError, match="save what is there as a file"):
        load_sources(address)


@pytest.mark.parametrize(
    "text", ["Travel is approved by the lead.", "\u5e74\u5047\u4e3a\u4e8c\u5341\u5929\u3002"]
)
def test_sentence_is_a_text_also_without_blanks(text: str) -> None:
    (document,) = documents(list(load_sources(text)))
    assert document.text == text


@pytest.mark.parametrize("name", ["", "no-such-thing", "./a b c d", "~/x y z w", "bad\0name", "a" * 5000])
def test_odd_names_are_user_errors(name: str) -> None:
    with pytest.raises(SourceError):
        load_sources(name)


def test_mistake_in_the_last_item_is_found_before_the_first_is_read(folder: Path) -> None:
    (folder / "a.txt").write_text("text")
    with pytest.raises(SourceError):
        load_sources([folder / "a.txt", folder / "typo.txt"])


def test_prose_is_a_text_and_different_texts_under_one_source_are_both_kept() -> None:
    items = ["Travel is approved by the lead.", *(Document(text, "s") for text in ("one", "two", "one"))]
    prose, *others = documents(list(load_sources(items)))
    assert prose.source.startswith("text-")
    assert [(document.source, document.text) for document in others] == [("s", "one"), ("s#2", "two")]


@pytest.mark.parametrize("item", [3, None, b"text", {"text": "a"}, object()])
def test_wrong_type_is_named(item: object) -> None:
    for items in (item, [item]):
        with pytest.raises(SourceError, match=f"cannot ingest a {type(item).__name__}"):
            load_sources(items)


@pytest.mark.parametrize(("given", "source"), [(Path("a/b.txt"), "a/b.txt"), (0, "0"), (None, "text-")])
def test_source_that_is_no_text_is_written_as_one(given: Any, source: str) -> None:
    (loaded,) = load_sources(Document("hello", given, part_of=given))
    assert isinstance(loaded, Document) and loaded.source.startswith(source)
    assert loaded.part_of == loaded.source


def test_lone_surrogates_reach_neither_tokenizer_nor_database() -> None:
    (document,) = documents(list(load_sources(Document("a\ud800b", "s\ud800"))))
    assert (document.text, document.source) == ("a\ufffdb", "s\ufffd")


def test_file_name_that_is_not_text_is_readable(folder: Path) -> None:
    with open(os.fsencode(folder) + b"/caf\xe9.txt", "w") as file:
        file.write("text")
    (document,) = documents(list(load_sources(folder)))
    document.source.encode()


@given(st.text(max_size=40))
def test_no_string_raises_anything_but_source_errors(text: str) -> None:
    with suppress(SourceError):
        load_sources(text)


def test_metadata_is_what_json_can_hold_and_a_changed_one_makes_another_version() -> None:
    day, loop = date(2026, 3, 1), dict[str, Any]()
    loop["itself"] = loop
    (told,) = load_sources([Document("A text.", "a", {"day": day, 3: [day], "none": None})])
    (other,) = load_sources([Document("A text.", "a", {"day": day})])
    assert isinstance(told, Document) and isinstance(other, Document)
    assert told.metadata == {"day": "2026-03-01", "3": ["2026-03-01"], "none": None}
    assert told.content_hash != other.content_hash != Document("A text.", "a").content_hash
    with pytest.raises(SourceError, match="metadata cannot be written as JSON"):
        list(load_sources([Document("A text.", "a", loop)]))
