"""Who owns which chunks: a chunk's row is there as long as somebody does."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence

import numpy as np

from blendrag.store.catalogue_schema import LAST, CataloguePart


class CatalogueOwners(CataloguePart):
    """The part of :class:`~blendrag.store.catalogue.Catalogue` that knows owners."""

    def register(self, owner: str, entries: Iterable[tuple[str, str, Sequence[int]]]) -> list[str]:
        """Make (key, text, token_ids) the owner's whole list of chunks.

        New chunks are pending. Returns the keys that nobody owns any more; their rows are gone.
        """
        rows = [(key, text, np.asarray(ids, "<i4").tobytes()) for key, text, ids in entries]
        keys = [(key,) for key, _, _ in rows]
        with self._file.transaction() as db:
            before = {key for (key,) in db.execute("SELECT key FROM owners WHERE owner = ?", (owner,))}
            db.executemany(
                "INSERT OR IGNORE INTO records (key, tokens) VALUES (?, ?)",
                [(key, len(ids) // 4) for key, _, ids in rows],
            )
            db.executemany("INSERT OR IGNORE INTO chunks (key, text, token_ids) VALUES (?, ?, ?)", rows)
            # A chunk that was evicted is wanted again.
            db.executemany("UPDATE records SET state = 'pending' WHERE key = ? AND state = 'evicted'", keys)
            db.executemany("DELETE FROM doomed WHERE key = ?", keys)
            db.executemany("INSERT OR IGNORE INTO owners VALUES (?, ?)", [(owner, key) for (key,) in keys])
            return _disown(db, owner, before - {key for (key,) in keys})

    def release(self, owner: str) -> list[str]:
        """Forget an owner. Returns the keys that nobody owns any more; their rows are gone."""
        with self._file.transaction() as db:
            keys = {key for (key,) in db.execute("SELECT key FROM owners WHERE owner = ?", (owner,))}
            return _disown(db, owner, keys)

    def only_of(self, owner: str) -> list[str]:
        """The keys that nobody else owns: what :meth:`release` would return."""
        return self._keys(
            "SELECT key FROM owners AS own WHERE owner = ? AND NOT EXISTS"
            " (SELECT 1 FROM owners AS other WHERE other.key = own.key AND other.owner != own.owner)",
            (owner,),
        )

    def owners(self, prefix: str = "") -> dict[str, list[str]]:
        """Chunk keys by owner, of the owners whose name begins with ``prefix``."""
        found: dict[str, list[str]] = {}
        begins = f"SELECT owner, key FROM owners WHERE owner >= ? AND owner < ? || {LAST}"
        for owner, key in self._file.rows(begins, (prefix, prefix)):
            found.setdefault(owner, []).append(key)
        return found


def doom(db: sqlite3.Connection, keys: Iterable[str], *, kept: bool) -> None:
    """Note that the files of these keys are to be deleted. kept: their KV stays ready in another tier."""
    db.executemany("INSERT OR REPLACE INTO doomed VALUES (?, ?)", [(key, kept) for key in keys])


def _disown(db: sqlite3.Connection, owner: str, keys: Iterable[str]) -> list[str]:
    orphans = []
    for key in sorted(keys):
        db.execute("DELETE FROM owners WHERE owner = ? AND key = ?", (owner, key))
        if not db.execute("SELECT 1 FROM owners WHERE key = ? LIMIT 1", (key,)).fetchone():
            db.execute("DELETE FROM chunks WHERE key = ?", (key,))
            db.execute("DELETE FROM records WHERE key = ?", (key,))
            orphans.append(key)
    doom(db, orphans, kept=False)
    return orphans
