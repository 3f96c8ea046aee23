from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.errors import StoreError, StoreFullError
from blendrag.index.ledger import Ledger
from blendrag.index.loaders import Document

NOTE = Document("Travel is approved by the lead.", "note")


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "index")


def test_document_is_not_ingested_twice_unless_text_or_settings_have_changed(ledger: Ledger) -> None:
    assert not ledger.unchanged(NOTE, "512/0")
    ledger.record(NOTE, ["k1", "k2"], "512/0")
    assert ledger.unchanged(NOTE, "512/0")
    assert not ledger.unchanged(NOTE, "256/0")
    assert not ledger.unchanged(Document(NOTE.text, "another"), "512/0")
    changed = Document("Größer", "note")
    assert not ledger.unchanged(changed, "512/0")
    ledger.record(changed, ["k2"], "512/0")
    rows = ledger._execute("SELECT source, chunk_keys, bytes, content_hash FROM documents")
    assert rows == [("note", '["k2"]', 8, changed.content_hash)]


def test_ledger_of_a_former_version_is_taken_over_and_its_texts_count_as_read_by_an_older_reader(
    tmp_path: Path,
) -> None:
    _former(tmp_path, {"note": NOTE.content_hash})
    for _ in range(2):
        ledger = Ledger(tmp_path)
        assert ledger.unchanged(NOTE, "f")
        assert ledger.read_by_older() == {"note"}
        assert ledger.wholes() == {"note": "note"}
        ledger.close()
    ledger = Ledger(tmp_path)
    ledger.read_by_newest("note")
    ledger.record(Document("text", "new"), ["k"], "f")
    assert ledger.read_by_older() == set()
    assert ledger.sources() == {"new", "note"}


def _former(root: Path, hashes: dict[str, str]) -> None:
    """As it was before the version of the readers was kept."""
    with closing(sqlite3.connect(root / "ledger.sqlite")) as db:
        db.execute(
            "CREATE TABLE documents (source TEXT PRIMARY KEY, content_hash TEXT NOT NULL,"
            " fingerprint TEXT NOT NULL, chunk_keys TEXT NOT NULL, bytes INTEGER NOT NULL,"
            " ingested_at REAL NOT NULL) STRICT"
        )
        for source, content_hash in hashes.items():
            db.execute("INSERT INTO documents VALUES (?, ?, 'f', '[\"k\"]', 1, 0)", (source, content_hash))
        db.commit()


def test_document_in_doubt_is_done_again_and_still_known_until_it_is_forgotten(ledger: Ledger) -> None:
    for doubt in (lambda: ledger.begin_storing(NOTE), lambda: ledger.begin_removing("note")):
        ledger.record(NOTE, ["k1"], "512/0")
        doubt()
        assert not ledger.unchanged(NOTE, "512/0") and ledger.sources() == {"note"}
    ledger.record(NOTE, ["k1"], "512/0")
    for source in ("note", "never there"):
        ledger.forget(source)
    assert ledger.sources() == set() and not ledger.unchanged(NOTE, "512/0")


def test_rows_survive_a_killed_process(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from blendrag.index.ledger import Ledger; from blendrag.index.loaders import Document\n"
        "Ledger(Path(sys.argv[1])).record(Document('text', 'a'), ['k'], 'f'); os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert Ledger(tmp_path).unchanged(Document("text", "a"), "f")


def test_what_is_below_a_folder_is_named_and_not_what_is_in_its_neighbour(ledger: Ledger) -> None:
    for source in ("/docs/a.txt", "/docs/deep/b.txt", "/docs2/c.txt", "note"):
        ledger.record(Document("text", source), ["k"], "f")
    assert ledger.under(["/docs"]) == {"/docs/a.txt", "/docs/deep/b.txt"}
    assert ledger.under(["/docs/a.txt"]) == {"/docs/a.txt"}
    assert ledger.under([]) == set()


def test_threads_do_not_lose_each_others_rows(ledger: Ledger) -> None:
    def work(number: int) -> None:
        for step in range(20):
            ledger.record(Document("text", f"{number}-{step}"), ["k"], "f")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ledger.sources()) == 80


def test_damaged_file_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").write_bytes(b"this is no database " * 100)
    with pytest.raises(StoreError):
        Ledger(tmp_path)


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), min_size=1), st.lists(st.text(max_size=5)), max_size=5
    )
)
def test_any_source_and_keys_come_back_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, rows: dict[str, list[str]]
) -> None:
    ledger = Ledger(tmp_path_factory.mktemp("ledger"))
    for source, keys in rows.items():
        ledger.record(Document("text", source), keys, "f")
    found = ledger._execute("SELECT source, chunk_keys FROM documents")
    assert {source: json.loads(keys) for source, keys in found} == rows
    ledger.close()


def test_full_disk_is_an_error_of_ours_and_costs_nothing_that_is_noted(ledger: Ledger) -> None:
    ledger.record(NOTE, ["k1"], "f")
    ((pages,),) = ledger._execute("PRAGMA page_count")
    ledger._execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreFullError, match=r"ledger\.sqlite failed"):
        ledger.record(Document("text", "large"), ["k" * 32] * 1000, "f")
    assert ledger.unchanged(NOTE, "f") and ledger.sources() == {"note"}
