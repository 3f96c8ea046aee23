"""SQLite as an index uses it: connections, transactions, and the errors for its failures."""

from __future__ import annotations

import contextlib
import errno
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from blendrag.errors import StoreError, StoreFullError
from blendrag.files.private import make_file, make_folder

_TIMEOUT_S = 30.0
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
_DAMAGED = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
_UNUSABLE = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM)


@contextlib.contextmanager
def errors_of(what: str) -> Iterator[None]:
    """Raise StoreFullError or StoreError, "what failed: reason", for an SQLite error inside."""
    try:
        yield
    except sqlite3.Error as error:
        full = _code(error) == sqlite3.SQLITE_FULL
        raise (StoreFullError if full else StoreError)(f"{what} failed: {error}{_remedy(error)}") from error


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Write all or nothing of what is written inside."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    finally:
        if db.in_transaction:  # a full disk has rolled back already
            db.execute("ROLLBACK")


def connect(path: Path) -> sqlite3.Connection:
    """Return a connection for several threads, in autocommit mode, to a file that other processes use as
    well. The file is made, for this user only, if it is not there. Raises StoreError."""
    try:
        make_folder(path.parent)
        make_file(path)
        db = sqlite3.connect(path, timeout=_TIMEOUT_S, check_same_thread=False, isolation_level=None)
        try:
            use_wal(db)
            db.execute("PRAGMA synchronous=NORMAL")
            db.execute("PRAGMA foreign_keys=ON")
        except BaseException:
            db.close()
            raise
        return db
    except (OSError, sqlite3.Error) as error:
        if getattr(error, "errno", None) in _NOT_WRITABLE or _code(error) in _UNUSABLE:
            raise StoreError(
                f"cannot write to the index folder {str(path.parent)!r}, and even reading an index takes"
                " notes there: allow this user to write to it, or copy it to where that is allowed"
            ) from error
        raise StoreError(f"cannot open {str(path)!r}: {error}{_remedy(error)}") from error


def use_wal(db: sqlite3.Connection) -> None:
    """Let others read while one writes. SQLite's timeout does not cover this switch: two processes that
    create a file meet here."""
    ends = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            db.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if _code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > ends:
                raise
        time.sleep(0.01)


def damaged(error: StoreError) -> bool:
    """Return whether the file is no database, or a broken one."""
    return _code(error.__cause__) in _DAMAGED


def _remedy(error: Exception) -> str:
    return "; take a copy of it back, or remove it" if _code(error) in _DAMAGED else ""


def _code(error: BaseException | None) -> int:
    """Return SQLite's primary result code; 0: not one of its own."""
    return (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF


# -- files as a whole -------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a connection in autocommit mode. Raises StoreError and StoreFullError for what goes wrong inside.

    A schema is not trusted with more than SQL itself: the file may come from elsewhere.
    """
    with (
        errors_of(path.name),
        contextlib.closing(sqlite3.connect(path, timeout=_TIMEOUT_S, isolation_level=None)) as db,
    ):
        db.execute("PRAGMA trusted_schema = OFF")
        yield db


def check(path: Path) -> list[str]:
    """Return what is wrong with the file's own structure; empty: nothing, or there is no file."""
    if not path.is_file():
        return []
    try:
        with opened(path) as db:
            lines = [str(line) for (line,) in db.execute("PRAGMA quick_check(10)")]
    except StoreError as error:
        return [str(error)]
    return [] if lines == ["ok"] else lines


def compact(path: Path) -> int:
    """Give back the room of what was deleted, and overwrite it. Returns the bytes freed. What was in use is
    copied, so that much disk space is needed meanwhile."""
    before = _size(path)
    with opened(path) as db:
        db.execute("VACUUM")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return max(0, before - _size(path))


def _size(path: Path) -> int:
    files = (path, path.with_name(f"{path.name}-wal"))
    return sum(file.stat().st_size for file in files if file.exists())
