"""What any SQLite file needs now and then, by a connection of its own."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from blendrag.errors import StoreError, StoreFullError
from blendrag.private import make_file


@contextlib.contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection in autocommit mode. Raises StoreError and StoreFullError for what goes wrong inside.

    A schema is not trusted with more than SQL itself: the file may come from elsewhere.
    """
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=30, isolation_level=None)) as db:
            db.execute("PRAGMA trusted_schema = OFF")
            yield db
    except sqlite3.Error as error:
        full = (getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF == sqlite3.SQLITE_FULL
        raise (StoreFullError if full else StoreError)(f"{path.name} failed: {error}") from error


def check(path: Path) -> list[str]:
    """What is wrong with the file's own structure; empty: nothing."""
    try:
        with opened(path) as db:
            lines = [str(line) for (line,) in db.execute("PRAGMA quick_check(10)")]
    except StoreError as error:
        return [str(error)]
    return [] if lines == ["ok"] else lines


def copy(path: Path, target: Path) -> None:
    """A copy as of now, with what is still in the log, as one file."""
    make_file(target)
    with opened(path) as source, opened(target) as copied:
        source.backup(copied)
        copied.execute("PRAGMA journal_mode = DELETE")


def compact(path: Path) -> int:
    """Give back the room of what was deleted, and overwrite it. Bytes freed; what was in use is copied, so
    that much disk space is needed meanwhile."""
    before = _size(path)
    with opened(path) as db:
        db.execute("VACUUM")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return max(0, before - _size(path))


def _size(path: Path) -> int:
    files = (path, path.with_name(f"{path.name}-wal"))
    return sum(file.stat().st_size for file in files if file.exists())


def suspicious(path: Path) -> str:
    """Why a file from elsewhere cannot be trusted; empty: it holds tables and indices, and is sound."""
    try:
        with opened(path) as db:
            kinds = {str(kind) for (kind,) in db.execute("SELECT DISTINCT type FROM sqlite_schema")}
    except StoreError as error:
        return f"cannot be read: {error}"
    if extra := kinds - {"table", "index"}:
        return f"has a {', '.join(sorted(extra))}, which would run by itself"
    problems = check(path)
    return f"is damaged: {problems[0]}" if problems else ""
