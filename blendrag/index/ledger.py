"""The ledger of documents: a row for each, so that a second ingest does only what has changed."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from blendrag.files.sqlite import connect, errors_of, transaction
from blendrag.index.formats import READER_VERSION
from blendrag.index.loaders import Document

_NAME = "ledger.sqlite"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS documents (
    source       TEXT PRIMARY KEY,
    content_hash TEXT NOT NULL,
    fingerprint  TEXT NOT NULL,
    chunk_keys   TEXT NOT NULL,
    bytes        INTEGER NOT NULL,
    ingested_at  REAL NOT NULL,
    reader       INTEGER NOT NULL DEFAULT 0,
    part_of      TEXT
) STRICT
"""
_SINCE = {"reader": "INTEGER NOT NULL DEFAULT 0", "part_of": "TEXT"}  # columns that former versions lack


class Ledger:
    """The table of documents, in ``root/ledger.sqlite``.

    A document is in doubt before it is changed or removed, and recorded or forgotten after everything else
    about it is stored or gone: what was interrupted has a row that no text equals, and is done again or
    removed. The fingerprint stands for the settings that the chunks depend on, in the caller's own words;
    none: in doubt. All methods raise StoreError if the file cannot be used, StoreFullError if there is no
    room for it.
    """

    def __init__(self, root: Path) -> None:
        self._lock = threading.Lock()
        self._db = connect(root / _NAME)
        try:
            with errors_of(_NAME):
                self._db.execute("PRAGMA synchronous=FULL")  # a document that counts as stored stays so
                self._db.execute(_SCHEMA)
                self._add_columns()
        except BaseException:
            self._db.close()
            raise

    def unchanged(self, document: Document, fingerprint: str) -> bool:
        """Return whether this very text is in the index, made with these settings."""
        rows = self._execute(
            "SELECT 1 FROM documents WHERE source = ? AND content_hash = ? AND fingerprint = ?",
            (document.source, document.content_hash, fingerprint),
        )
        return bool(rows)

    def chunk_keys(self, source: str) -> list[str]:
        """Return the keys of the chunks that a document was stored as."""
        rows = self._execute("SELECT chunk_keys FROM documents WHERE source = ?", (source,))
        return [str(key) for (keys,) in rows for key in json.loads(keys)]

    def chunk_counts(self) -> dict[str, int]:
        """Return, by source, the number of chunks that each document was stored as."""
        return dict(self._execute("SELECT source, json_array_length(chunk_keys) FROM documents"))

    def begin_storing(self, document: Document) -> None:
        """Note that a document is about to be stored, in place of what was noted about it before."""
        self.record(document, (), "")

    def begin_removing(self, source: str) -> None:
        """Note that a document is about to be removed."""
        self._execute("UPDATE documents SET fingerprint = '' WHERE source = ?", (source,))

    def record(self, document: Document, chunk_keys: Sequence[str], fingerprint: str) -> None:
        """Note that a document is completely stored, in place of what was noted about it before."""
        row = (
            document.source,
            document.content_hash,
            fingerprint,
            json.dumps(list(chunk_keys)),
            len(document.text.encode()),
            time.time(),
            READER_VERSION,
            document.part_of or document.source,
        )
        self._execute(
            "INSERT OR REPLACE INTO documents (source, content_hash, fingerprint, chunk_keys, bytes,"
            " ingested_at, reader, part_of) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            row,
        )

    def forget(self, source: str) -> None:
        """Remove a document's row: after what it stands for is gone."""
        self._execute("DELETE FROM documents WHERE source = ?", (source,))

    def read_by_older(self) -> set[str]:
        """Return the sources whose texts an older version of the readers made."""
        rows = self._execute("SELECT source FROM documents WHERE reader < ?", (READER_VERSION,))
        return {str(source) for (source,) in rows}

    def read_by_newest(self, source: str) -> None:
        """Note that this version of the readers makes the same text."""
        self._execute("UPDATE documents SET reader = ? WHERE source = ?", (READER_VERSION, source))

    def sources(self) -> set[str]:
        return {str(source) for (source,) in self._execute("SELECT source FROM documents")}

    def wholes(self) -> dict[str, str]:
        """Return, by source, the source that each document is a part of. Former versions did not note it."""
        return dict(self._execute("SELECT source, IFNULL(part_of, source) FROM documents"))

    def set_part_of(self, source: str, whole: str) -> None:
        """Note the source that a document is a part of."""
        self._execute("UPDATE documents SET part_of = ? WHERE source = ?", (whole, source))

    def under(self, roots: Iterable[str]) -> set[str]:
        """Return the sources that are one of these files, a part of one, or below one of these folders.

        Behind a link to a folder there may be documents by its real path, as former versions named them.
        """
        tops = set(roots)
        paths = tops | {os.path.realpath(root) for root in tops if os.path.isdir(root)}
        folders = tuple(path.rstrip(os.sep) + os.sep for path in paths)
        return {
            source for source, whole in self.wholes().items() if whole in tops or source.startswith(folders)
        }

    def close(self) -> None:
        self._db.close()

    def _add_columns(self) -> None:
        """Bring a table of a former version up to date. Its texts are those of the readers' version 0."""
        with transaction(self._db):
            there = {row[1] for row in self._db.execute("PRAGMA table_info(documents)")}
            for column, kind in _SINCE.items():
                if column not in there:
                    self._db.execute(f"ALTER TABLE documents ADD COLUMN {column} {kind}")

    def _execute(self, sql: str, values: Sequence[object] = ()) -> list[Any]:
        with self._lock, errors_of(_NAME), closing(self._db.execute(sql, values)) as cursor:
            return cursor.fetchall()
