"""The catalogue's file: its tables, how it is opened, and what its failures are called.

``records`` has what changes with every use, and nothing else: sums and sorts over a million chunks read a
small table, apart from the texts. ``doomed`` has the keys whose files are to be deleted: a row goes in with
the transaction that makes a file superfluous, and out when the file is gone, so a crash in between costs a
look into this table instead of one at every file.
"""

from __future__ import annotations

import errno
import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from blendrag.errors import StoreError, StoreFullError, StoreMismatchError
from blendrag.private import make_file, make_folder
from blendrag.store.identity import KVIdentity

_VERSION = 2
_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE records (
    key TEXT PRIMARY KEY, state TEXT NOT NULL DEFAULT 'pending', bytes INTEGER NOT NULL DEFAULT 0,
    tokens INTEGER NOT NULL, used INTEGER NOT NULL DEFAULT 0, uses INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;
CREATE INDEX records_pending ON records(state) WHERE state = 'pending';
CREATE TABLE chunks (
    number INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, text TEXT NOT NULL, token_ids BLOB NOT NULL
) STRICT;
CREATE TABLE owners (
    owner TEXT NOT NULL, key TEXT NOT NULL REFERENCES records(key), PRIMARY KEY (owner, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX owners_by_key ON owners(key);
CREATE TABLE doomed (key TEXT PRIMARY KEY, kept INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE counters (
    tier TEXT NOT NULL, name TEXT NOT NULL, value INTEGER NOT NULL, PRIMARY KEY (tier, name)
) STRICT, WITHOUT ROWID;
"""
LAST = "CAST(X'FF' AS TEXT)"  # sorts after every character: no UTF-8 has this byte

_TIMEOUT_S = 30.0
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
_UNUSABLE = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM)


class CatalogueFile:
    """A connection to ``root/catalogue.sqlite``, for several threads; other processes have their own."""

    def __init__(self, connection: sqlite3.Connection, identity: KVIdentity) -> None:
        self._connection, self.identity = connection, identity
        self._lock = threading.Lock()

    @classmethod
    def open(cls, root: Path, identity: KVIdentity | None) -> CatalogueFile:
        """Open or create, for this user only; without an identity, open what there is with its own.

        Raises StoreError, and StoreMismatchError if it was made with another identity.
        """
        connection = _connect(root, create=identity is not None)
        try:
            with _translated(), _transaction(connection) as db:
                if identity is not None:
                    _create(db, identity)
                stored = _stored_identity(db, root)
            if identity is not None and stored.digest() != identity.digest():
                raise _mismatch(root, stored, identity)
        except BaseException:
            connection.close()
            raise
        return cls(connection, stored)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing of what is written. Raises StoreError, StoreFullError."""
        with self._lock, _translated(), _transaction(self._connection) as db:
            yield db

    def rows(self, query: str, values: Sequence[str | int] = ()) -> list[Any]:
        """What a query finds. Raises StoreError."""
        with self._lock, _translated():
            return self._connection.execute(query, values).fetchall()

    def close(self) -> None:
        with self._lock:
            self._connection.close()


class CataloguePart:
    """Some of a catalogue's methods, in a file of their own."""

    def __init__(self, file: CatalogueFile) -> None:
        self._file = file

    def _keys(self, query: str, values: Sequence[str] = ()) -> list[str]:
        return [key for (key,) in self._file.rows(query, values)]


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield db
        db.execute("COMMIT")
    finally:
        if db.in_transaction:  # a full disk has rolled back already
            db.execute("ROLLBACK")


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        full = _code(error) == sqlite3.SQLITE_FULL
        raise (StoreFullError if full else StoreError)(f"the catalogue failed: {error}") from error


def _connect(root: Path, *, create: bool) -> sqlite3.Connection:
    path = root / "catalogue.sqlite"
    if not create and not path.is_file():
        raise StoreError(f"no index at {str(root)!r}")
    try:
        make_folder(root)
        make_file(path)
        connection = sqlite3.connect(path, timeout=_TIMEOUT_S, check_same_thread=False, isolation_level=None)
        try:
            _use_wal(connection)
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute("PRAGMA foreign_keys=ON")
        except BaseException:
            connection.close()
            raise
        return connection
    except (OSError, sqlite3.Error) as error:
        if getattr(error, "errno", None) in _NOT_WRITABLE or _code(error) in _UNUSABLE:
            raise StoreError(
                f"cannot write to the index folder {str(root)!r}, and even reading an index takes notes"
                " there: allow this user to write to it, or copy it to where that is allowed"
            ) from error
        raise StoreError(f"cannot open the catalogue {str(path)!r}: {error}") from error


def _use_wal(connection: sqlite3.Connection) -> None:
    """SQLite's timeout does not cover this switch: two processes that create a catalogue meet here."""
    ends = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if _code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > ends:
                raise
        time.sleep(0.01)


def _create(db: sqlite3.Connection, identity: KVIdentity) -> None:
    if not db.execute("SELECT 1 FROM sqlite_schema").fetchone():
        for statement in _SCHEMA.split(";\n"):
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {_VERSION}")
        db.execute("INSERT INTO meta VALUES ('identity', ?)", (json.dumps(asdict(identity)),))


def _stored_identity(db: sqlite3.Connection, root: Path) -> KVIdentity:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version != _VERSION:
        raise _made_by_another_version(root)
    (stored,) = db.execute("SELECT value FROM meta WHERE name = 'identity'").fetchone()
    try:
        values = json.loads(stored)
        identity = KVIdentity(**values)
    except (TypeError, ValueError):
        raise _made_by_another_version(root) from None
    if set(values) != {field.name for field in fields(KVIdentity)}:
        raise _made_by_another_version(root)  # no default stands for a field that it does not name
    return identity


def _mismatch(root: Path, stored: KVIdentity, identity: KVIdentity) -> StoreMismatchError:
    different = stored.differences(identity)
    if set(different) <= {"codec", "namespace", "dtype", "prefix"}:  # settings, and not another model
        had = ", ".join(_setting(stored, name) for name in different)
        has = ", ".join(_setting(identity, name) for name in different)
        if "prefix" in different and had == has:
            had, has = "another shared prefix (system_prompt, separator or chat template)", "this one"
        return StoreMismatchError(
            f"the index {str(root)!r} was made with {had}, not {has}: open it with that, or ingest into a new"
            " folder"
        )
    return StoreMismatchError(
        f"the index {str(root)!r} was made with model {stored.model!r}, not {identity.model!r}"
        f" (different: {', '.join(different)}):"
        " open it with that model, or ingest into a new folder"
    )


def _setting(identity: KVIdentity, name: str) -> str:
    """What a user has set to get this."""
    if name == "prefix":
        return f"shared_prefix={identity.prefix_kind!r}"
    return f"{name}={getattr(identity, name)!r}"


def _made_by_another_version(root: Path) -> StoreMismatchError:
    return StoreMismatchError(
        f"the index {str(root)!r} was made by another version of blendrag: ingest into a new folder"
    )


def _code(error: Exception) -> int:
    """SQLite's primary result code; 0: not one of its own."""
    return (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
