"""The catalogue: which chunks belong to the index, who owns them, and whether their KV is there.

SQLite in WAL mode, in ``root/catalogue.sqlite``: the client process and the engine's worker use it at once.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from blendrag.errors import StoreError, StoreFullError, StoreMismatchError
from blendrag.store.identity import KVIdentity

State = Literal["pending", "ready", "evicted"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS chunks (
    key TEXT PRIMARY KEY, text TEXT NOT NULL, token_ids BLOB NOT NULL,
    state TEXT NOT NULL DEFAULT 'pending', bytes INTEGER NOT NULL DEFAULT 0, used INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE IF NOT EXISTS owners (
    owner TEXT NOT NULL, key TEXT NOT NULL REFERENCES chunks(key), PRIMARY KEY (owner, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS owners_by_key ON owners(key);
CREATE INDEX IF NOT EXISTS chunks_by_state ON chunks(state) WHERE state != 'ready';
"""
_TIMEOUT_S = 30.0
_MANY = 500  # variables in one statement


@dataclass(frozen=True, slots=True)
class Entry:
    """A chunk as the catalogue knows it. ``bytes``: of its KV, 0 unless ready."""

    key: str
    text: str
    token_ids: tuple[int, ...]
    state: State
    bytes: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Chunks and bytes by state, and owners."""

    chunks: int
    ready: int
    pending: int
    evicted: int
    tokens: int
    bytes: int
    owners: int


class Catalogue:
    """Open with :meth:`open`. Safe for several threads; every call is one short transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    @classmethod
    def open(cls, root: Path, identity: KVIdentity) -> Catalogue:
        """Open or create. Raises StoreMismatchError if the store was made with another identity."""
        path = root / "catalogue.sqlite"
        try:
            root.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(
                path, timeout=_TIMEOUT_S, check_same_thread=False, isolation_level=None
            )
            _use_wal(connection)
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute("PRAGMA foreign_keys=ON")
            connection.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"cannot open the catalogue {str(path)!r}: {error}") from error
        catalogue = cls(connection)
        try:
            catalogue._check(identity, root)
        except BaseException:
            catalogue.close()
            raise
        return catalogue

    def _check(self, identity: KVIdentity, root: Path) -> None:
        with self._transaction() as db:
            db.execute("INSERT OR IGNORE INTO meta VALUES ('identity', ?)", (json.dumps(asdict(identity)),))
            (stored,) = db.execute("SELECT value FROM meta WHERE name = 'identity'").fetchone()
        try:
            made_with = KVIdentity(**json.loads(stored))
        except (TypeError, ValueError):
            raise StoreMismatchError(
                f"the index {str(root)!r} was made by another version of blendrag: ingest into a new folder"
            ) from None
        if made_with.digest() != identity.digest():
            raise StoreMismatchError(
                f"the index {str(root)!r} was made with model {made_with.model!r}, not {identity.model!r}"
                f" (different: {', '.join(made_with.differences(identity))}):"
                " open it with that model, or ingest into a new folder"
            )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            db = self._connection
            try:
                db.execute("BEGIN IMMEDIATE")
                try:
                    yield db
                    db.execute("COMMIT")
                finally:
                    if db.in_transaction:  # a full disk has rolled back already
                        db.execute("ROLLBACK")
            except sqlite3.Error as error:
                raise _error(error) from error

    # -- ownership ----------------------------------------------------------------------------------------

    def register(self, owner: str, entries: Iterable[tuple[str, str, Sequence[int]]]) -> list[str]:
        """Make (key, text, token_ids) the owner's whole list of chunks.

        New chunks are pending. Returns the keys that nobody owns any more; their rows are gone.
        """
        rows = [(key, text, np.asarray(ids, "<i4").tobytes()) for key, text, ids in entries]
        with self._transaction() as db:
            before = {key for (key,) in db.execute("SELECT key FROM owners WHERE owner = ?", (owner,))}
            db.executemany("INSERT OR IGNORE INTO chunks (key, text, token_ids) VALUES (?, ?, ?)", rows)
            # A chunk that was evicted is wanted again.
            db.executemany(
                "UPDATE chunks SET state = 'pending' WHERE key = ? AND state = 'evicted'",
                [(key,) for key, _, _ in rows],
            )
            db.executemany("INSERT OR IGNORE INTO owners VALUES (?, ?)", [(owner, key) for key, _, _ in rows])
            return _disown(db, owner, before - {key for key, _, _ in rows})

    def release(self, owner: str) -> list[str]:
        """Forget an owner. Returns the keys that nobody owns any more; their rows are gone."""
        with self._transaction() as db:
            keys = {key for (key,) in db.execute("SELECT key FROM owners WHERE owner = ?", (owner,))}
            return _disown(db, owner, keys)

    def owners(self, prefix: str = "") -> dict[str, list[str]]:
        """Chunk keys by owner, of the owners whose name begins with ``prefix``."""
        found: dict[str, list[str]] = {}
        begins = "SELECT owner, key FROM owners WHERE owner >= ? AND substr(owner, 1, length(?)) = ?"
        for owner, key in self._rows(begins, (prefix, prefix, prefix)):
            found.setdefault(owner, []).append(key)
        return found

    # -- chunks -------------------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """All chunks."""
        return self._select("")

    def pending(self) -> list[Entry]:
        """Chunks whose KV is not there yet, or not any more because it was damaged."""
        return self._select("WHERE state = 'pending'")

    def entries_of(self, keys: Iterable[str]) -> list[Entry]:
        """Those of ``keys`` that are known, each once, in no particular order."""
        wanted = sorted(set(keys))
        found: list[Entry] = []
        for at in range(0, len(wanted), _MANY):
            part = wanted[at : at + _MANY]
            found += self._select(f"WHERE key IN ({','.join('?' * len(part))})", part)
        return found

    def knows(self, key: str) -> bool:
        """Whether a chunk belongs to the index."""
        return bool(self._rows("SELECT 1 FROM chunks WHERE key = ?", (key,)))

    def known(self) -> set[str]:
        """The keys of all chunks."""
        return {key for (key,) in self._rows("SELECT key FROM chunks")}

    def ready(self, keys: Iterable[str]) -> set[str]:
        """Those of ``keys`` whose KV is there."""
        wanted: list[str] = list(keys)
        found: set[str] = set()
        for at in range(0, len(wanted), _MANY):
            part = wanted[at : at + _MANY]
            marks = ",".join("?" * len(part))
            rows = self._rows(f"SELECT key FROM chunks WHERE state = 'ready' AND key IN ({marks})", part)
            found.update(key for (key,) in rows)
        return found

    def recent(self) -> list[str]:
        """Ready keys, least recently used first."""
        return [key for (key,) in self._rows("SELECT key FROM chunks WHERE state = 'ready' ORDER BY used")]

    def mark_ready(self, key: str, nbytes: int) -> bool:
        """Note that a chunk's KV of ``nbytes`` is stored. False if the chunk is not (any more) known."""
        with self._transaction() as db:
            changed = db.execute(
                "UPDATE chunks SET state = 'ready', bytes = ? WHERE key = ?", (nbytes, key)
            ).rowcount
        return bool(changed)

    def mark(self, keys: Iterable[str], state: Literal["pending", "evicted"]) -> None:
        """Note that the KV of these chunks is gone: wanted again, or not."""
        with self._transaction() as db:
            db.executemany(
                "UPDATE chunks SET state = ?, bytes = 0 WHERE key = ?", [(state, key) for key in keys]
            )

    def touch(self, uses: dict[str, int]) -> None:
        """Note when chunks were last used, in any unit that grows."""
        with self._transaction() as db:
            db.executemany(
                "UPDATE chunks SET used = ? WHERE key = ?", [(used, key) for key, used in uses.items()]
            )

    def totals(self) -> Totals:
        rows = self._rows(
            "SELECT state, COUNT(*), SUM(bytes), SUM(LENGTH(token_ids)) / 4 FROM chunks GROUP BY state"
        )
        ((owners,),) = self._rows("SELECT COUNT(DISTINCT owner) FROM owners")
        counts = {state: count for state, count, _, _ in rows}
        return Totals(
            chunks=sum(counts.values()),
            ready=counts.get("ready", 0),
            pending=counts.get("pending", 0),
            evicted=counts.get("evicted", 0),
            tokens=sum(tokens for *_, tokens in rows),
            bytes=sum(size for _, _, size, _ in rows),
            owners=owners,
        )

    def _select(self, where: str, values: Sequence[str] = ()) -> list[Entry]:
        rows = self._rows(
            f"SELECT key, text, token_ids, state, bytes FROM chunks {where} ORDER BY rowid", values
        )
        return [
            Entry(key, text, tuple(np.frombuffer(ids, "<i4").tolist()), state, size)
            for key, text, ids, state, size in rows
        ]

    def _rows(self, query: str, values: Sequence[str] = ()) -> list[Any]:
        with self._lock:
            try:
                return self._connection.execute(query, values).fetchall()
            except sqlite3.Error as error:
                raise _error(error) from error

    def close(self) -> None:
        with self._lock:
            self._connection.close()


def _use_wal(connection: sqlite3.Connection) -> None:
    """SQLite's timeout does not cover this switch: two processes that create a catalogue meet here."""
    ends = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > ends:
                raise
        time.sleep(0.01)


def _error(error: sqlite3.Error) -> StoreError:
    full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return (StoreFullError if full else StoreError)(f"the catalogue failed: {error}")


def _disown(db: sqlite3.Connection, owner: str, keys: Iterable[str]) -> list[str]:
    orphans = []
    for key in sorted(keys):
        db.execute("DELETE FROM owners WHERE owner = ? AND key = ?", (owner, key))
        if not db.execute("SELECT 1 FROM owners WHERE key = ? LIMIT 1", (key,)).fetchone():
            db.execute("DELETE FROM chunks WHERE key = ?", (key,))
            orphans.append(key)
    return orphans
