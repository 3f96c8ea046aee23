"""The catalogue: which chunks belong to the index, who owns them, and whether their KV is there.

SQLite, in ``root/catalogue.sqlite``: the client process and the engine's worker use it at once.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from blendrag.errors import StoreMismatchError
from blendrag.store.catalogue_owners import CatalogueOwners, doom
from blendrag.store.catalogue_schema import LAST, CatalogueFile
from blendrag.store.catalogue_usage import CatalogueUsage
from blendrag.store.identity import KVIdentity

State = Literal["pending", "ready", "evicted"]

_MANY = 500  # variables in one statement


@dataclass(frozen=True, slots=True)
class Entry:
    """A chunk as the catalogue knows it. ``bytes``: of its KV, 0 unless ready."""

    key: str
    text: str
    token_ids: tuple[int, ...]
    state: State
    bytes: int


class Catalogue(CatalogueOwners, CatalogueUsage):
    """Open with :meth:`open`. Safe for several threads; every call is one short transaction.

    All methods raise StoreError if the file cannot be used, StoreFullError if there is no room for it.
    """

    def __init__(self, file: CatalogueFile, root: Path) -> None:
        super().__init__(file)
        self._root = root

    @classmethod
    def open(cls, root: Path, identity: KVIdentity | None) -> Catalogue:
        """Open or create; without an identity, open what there is, whatever it was made with.

        Raises StoreMismatchError if the store was made with another identity.
        """
        return cls(CatalogueFile.open(root, identity), root)

    def close(self) -> None:
        self._file.close()

    @property
    def identity(self) -> KVIdentity:
        """What it was made with."""
        return self._file.identity

    @property
    def dtype(self) -> str | None:
        """What the KV was computed in; None until the first engine has said so."""
        rows = self._file.rows("SELECT value FROM meta WHERE name = 'dtype'")
        return rows[0][0] if rows else None

    def settle_dtype(self, dtype: str) -> None:
        """Note what the engine computes in. An identity may leave it open, records of two do not mix.

        Raises StoreMismatchError if an engine with another has written to this store.
        """
        with self._file.transaction() as db:
            db.execute("INSERT OR IGNORE INTO meta VALUES ('dtype', ?)", (dtype,))
            (stored,) = db.execute("SELECT value FROM meta WHERE name = 'dtype'").fetchone()
        if stored != dtype:
            raise StoreMismatchError(
                f"the index {str(self._root)!r} was made by an engine that computes in {stored}, not {dtype}:"
                f" set dtype to {stored}, or ingest into a new folder"
            )

    # -- chunks -------------------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """All chunks, oldest first."""
        return self._select("")

    def pending(self) -> list[Entry]:
        """Chunks whose KV is not there yet, or not any more because it was damaged."""
        return self._select("WHERE state = 'pending'")

    def entries_of(self, keys: Iterable[str]) -> list[Entry]:
        """Those of ``keys`` that are known, each once, in no particular order."""
        parts = _parts(sorted(set(keys)))
        return [entry for part in parts for entry in self._select(f"WHERE key IN ({_marks(part)})", part)]

    def knows(self, key: str) -> bool:
        """Whether a chunk belongs to the index."""
        return bool(self._file.rows("SELECT 1 FROM records WHERE key = ?", (key,)))

    def known(self, keys: Iterable[str] | None = None) -> set[str]:
        """Those of ``keys`` that belong to the index; None: all that do."""
        if keys is None:
            return set(self._keys("SELECT key FROM records"))
        return self._among(keys, "")

    def ready(self, keys: Iterable[str]) -> set[str]:
        """Those of ``keys`` whose KV is there."""
        return self._among(keys, "state = 'ready' AND")

    def ready_from(self, prefix: str) -> set[str]:
        """The keys of ready chunks that begin with ``prefix``: what is to be found in one folder of files."""
        query = f"SELECT key FROM records WHERE key >= ? AND key < ? || {LAST} AND state = 'ready'"
        return set(self._keys(query, (prefix, prefix)))

    def pending_among(self, keys: Iterable[str]) -> set[str]:
        """Those of ``keys`` whose KV is wanted and not noted to be there."""
        return self._among(keys, "state = 'pending' AND")

    def pending_keys(self) -> list[str]:
        """The keys of :meth:`pending`, without reading texts."""
        return self._keys("SELECT key FROM records WHERE state = 'pending'")

    def recent(self) -> list[tuple[str, int]]:
        """Ready keys and the bytes of their KV, least recently used first."""
        return self._file.rows("SELECT key, bytes FROM records WHERE state = 'ready' ORDER BY used")

    # -- what is stored -----------------------------------------------------------------------------------

    def mark_ready(self, key: str, nbytes: int) -> bool:
        """Note that a chunk's KV of ``nbytes`` is stored. False if the chunk is not (any more) known."""
        with self._file.transaction() as db:
            changed = db.execute(
                "UPDATE records SET state = 'ready', bytes = ? WHERE key = ?", (nbytes, key)
            ).rowcount
            if changed:
                db.execute("DELETE FROM doomed WHERE key = ?", (key,))
        return bool(changed)

    def mark(self, keys: Iterable[str], state: Literal["pending", "evicted"]) -> None:
        """Note that the KV of these chunks is gone: wanted again, or not."""
        with self._file.transaction() as db:
            _mark(db, keys, state)

    def evict(self, keys: Iterable[str], *, keep_ready: bool = False) -> None:
        """Note that the files of these chunks are about to be deleted: they are :meth:`doomed` from here on.

        keep_ready: their KV stays ready, because another tier has it.
        """
        keys = list(keys)
        with self._file.transaction() as db:
            if not keep_ready:
                _mark(db, keys, "evicted")
            doom(db, keys, kept=keep_ready)

    def doomed(self) -> list[str]:
        """Keys whose files can be deleted: there are any after a crash between saying so and doing it."""
        return self._keys(
            "SELECT doomed.key FROM doomed LEFT JOIN records ON records.key = doomed.key"
            " WHERE kept OR state IS NULL OR state = 'evicted'"
        )

    def buried(self, keys: Iterable[str]) -> None:
        """Note that the files of doomed keys are gone."""
        with self._file.transaction() as db:
            db.executemany("DELETE FROM doomed WHERE key = ?", [(key,) for key in keys])

    # -- reading ------------------------------------------------------------------------------------------

    def _select(self, where: str, values: Sequence[str] = ()) -> list[Entry]:
        rows = self._file.rows(
            "SELECT key, text, token_ids, state, bytes FROM chunks JOIN records USING (key)"
            f" {where} ORDER BY number",
            values,
        )
        return [
            Entry(key, text, tuple(np.frombuffer(ids, "<i4").tolist()), state, size)
            for key, text, ids, state, size in rows
        ]

    def _among(self, keys: Iterable[str], condition: str) -> set[str]:
        query = "SELECT key FROM records WHERE {} key IN ({})"
        parts = _parts(list(keys))
        return {key for part in parts for key in self._keys(query.format(condition, _marks(part)), part)}


def _parts(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    return (keys[at : at + _MANY] for at in range(0, len(keys), _MANY))


def _marks(part: Sequence[Any]) -> str:
    return ",".join("?" * len(part))


def _mark(db: sqlite3.Connection, keys: Iterable[str], state: State) -> None:
    db.executemany("UPDATE records SET state = ?, bytes = 0 WHERE key = ?", [(state, key) for key in keys])
