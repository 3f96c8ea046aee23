"""The catalogue's file: opened, checked, and used by several threads and processes."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from blendrag.errors import StoreError, StoreMismatchError
from blendrag.files import sqlite
from blendrag.store.catalogue_schema import create, mismatch, stored_identity
from blendrag.store.identity import KVIdentity

_NAME = "catalogue.sqlite"

Values = Sequence[str | int] | Mapping[str, str]
"""The values of a query's place holders."""


class CatalogueFile:
    """The file of one catalogue. Safe for several threads; every call is one short transaction.

    ``identity``: the one that it was made with.
    """

    def __init__(self, db: sqlite3.Connection, identity: KVIdentity, root: Path) -> None:
        self._db, self.identity, self._root = db, identity, root
        self._lock = threading.Lock()

    @classmethod
    def open(cls, root: Path, identity: KVIdentity | None) -> Self:
        """Open or create it, for this user only. Without an identity, open what there is, whatever it was
        made with.

        Raises StoreMismatchError if the store was made with another identity.
        """
        path = root / _NAME
        if identity is None and not cls.is_in(root):
            raise StoreError(f"no index at {str(root)!r}")
        db = sqlite.connect(path)
        try:
            with sqlite.errors_of("the catalogue"), sqlite.transaction(db):
                if identity is not None:
                    create(db, identity)
                stored = stored_identity(db, root)
            if identity is not None and stored.digest() != identity.digest():
                raise mismatch(root, stored, identity)
        except BaseException:
            db.close()
            raise
        return cls(db, stored, root)

    @staticmethod
    def is_in(root: Path) -> bool:
        """Return whether a folder has one. An empty file is none: nothing was written to it."""
        path = root / _NAME
        return path.is_file() and path.stat().st_size > 0

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @property
    def dtype(self) -> str | None:
        """Return the dtype that the KV was computed in; None until the first engine has said so."""
        rows = self._rows("SELECT value FROM meta WHERE name = 'dtype'")
        return rows[0][0] if rows else None

    def settle_dtype(self, dtype: str) -> None:
        """Note the dtype that the engine computes in. An identity may leave it open, but records of two
        dtypes do not mix.

        Raises StoreMismatchError if an engine with another dtype has written to this store.
        """
        with self._transaction() as db:
            db.execute("INSERT OR IGNORE INTO meta VALUES ('dtype', ?)", (dtype,))
            (stored,) = db.execute("SELECT value FROM meta WHERE name = 'dtype'").fetchone()
        if stored != dtype:
            raise StoreMismatchError(
                f"the index {str(self._root)!r} was made by an engine that computes in {stored}, not {dtype}:"
                f" set dtype to {stored}, or ingest into a new folder"
            )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, sqlite.errors_of("the catalogue"), sqlite.transaction(self._db):
            yield self._db

    def _rows(self, query: str, values: Values = ()) -> list[Any]:
        with self._lock, sqlite.errors_of("the catalogue"):
            return self._db.execute(query, values).fetchall()

    def _keys(self, query: str, values: Values = ()) -> list[str]:
        return [key for (key,) in self._rows(query, values)]
