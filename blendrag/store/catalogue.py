"""The catalogue: which chunks belong to the index, who owns them, and whether their KV is there.

SQLite, in ``root/catalogue.sqlite``: the client process and the engine's worker use it at once. ``records``
has what changes with every use, and nothing else: sums and sorts over a million chunks read a small table,
apart from the texts. ``forms`` has the chunks that are another one's text as prompts write it, escaped: they
have the same owners, and leave with it. ``doomed`` has the keys whose files are to be deleted: a row goes in
with the transaction that makes a file superfluous, and out when the file is gone, so a crash in between costs
a look into this table instead of one at every file. ``changes`` has the chunks that came, went or got other
owners last: a process that keeps the texts in memory reads those, whichever process has changed them.
``collections`` has the totals of each, by triggers.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from blendrag.store.catalogue_file import CatalogueFile
from blendrag.store.contexts import Chunk, Ids, State

_LAST = "CAST(X'FF' AS TEXT)"  # sorts after every character: no UTF-8 has this byte

_REMEMBERED = 10_000  # changes; a process that has missed more reads all texts again

_LISTED = "(SELECT value FROM json_each(?))"  # for any number of values
# The same for names, see _named.
_NAMED = "(SELECT replace(replace(value, '%00', char(0)), '%25', '%') FROM json_each(?))"

_NO_FORM = "key NOT IN (SELECT key FROM forms)"


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of chunks and bytes by state, and the number of owners."""

    chunks: int
    ready: int
    pending: int
    evicted: int
    tokens: int
    bytes: int
    owners: int


@dataclass(frozen=True, slots=True)
class Kept:
    """A chunk of an owner, without its text. bytes: 0 unless ready. uses: of its KV, from the store."""

    owner: str
    key: str
    state: State
    tokens: int
    bytes: int
    uses: int


@dataclass(frozen=True, slots=True)
class Reuse:
    """The uses of an owner's chunks from the store."""

    owner: str
    chunks: int
    tokens: int
    uses: int


class Catalogue(CatalogueFile):
    """The catalogue of one index. Open it with :meth:`open`.

    All methods raise StoreError if the file cannot be used, StoreFullError if there is no room for it.
    """

    # -- chunks -------------------------------------------------------------------------------------------

    def entries(self) -> list[Chunk]:
        """Return all chunks, oldest first."""
        return self._select("")

    def pending(self) -> list[Chunk]:
        """Return the chunks whose KV is not there yet, or not any more because it was damaged."""
        return self._select("WHERE state = 'pending'")

    def entries_of(self, keys: Iterable[str]) -> list[Chunk]:
        """Return those of ``keys`` that are known, each once, oldest first."""
        return self._select(f"WHERE key IN {_LISTED}", (json.dumps(list(keys)),))

    def knows(self, key: str) -> bool:
        """Return whether a chunk belongs to the index."""
        return bool(self._rows("SELECT 1 FROM records WHERE key = ?", (key,)))

    def known(self, keys: Iterable[str] | None = None) -> set[str]:
        """Return those of ``keys`` that belong to the index; None: all that do."""
        if keys is None:
            return set(self._keys("SELECT key FROM records"))
        return self._among(keys, "")

    def changes(self, since: int) -> tuple[int, list[str] | None]:
        """Return the number of the last change to the set of chunks or to their owners, and the keys that it
        is about, of those after number ``since``; None for more than are remembered."""
        ((last,),) = self._rows("SELECT IFNULL(MAX(number), 0) FROM changes")
        if last == since:
            return last, []
        keys = self._keys("SELECT key FROM changes WHERE number > ? AND number <= ?", (since, last))
        return last, keys if len(keys) == last - since else None

    def ready(self, keys: Iterable[str]) -> set[str]:
        """Return those of ``keys`` whose KV is there."""
        return self._among(keys, "state = 'ready' AND")

    def ready_from(self, prefix: str) -> set[str]:
        """Return the keys of ready chunks that begin with ``prefix``, and so share a folder."""
        query = f"SELECT key FROM records WHERE key >= ? AND key < ? || {_LAST} AND state = 'ready'"
        return set(self._keys(query, (prefix, prefix)))

    def pending_among(self, keys: Iterable[str]) -> set[str]:
        """Return those of ``keys`` whose KV is wanted and not noted to be there."""
        return self._among(keys, "state = 'pending' AND")

    def pending_keys(self) -> list[str]:
        """Return the keys of :meth:`pending`, without reading texts."""
        return self._keys("SELECT key FROM records WHERE state = 'pending'")

    def recent(self) -> list[tuple[str, int]]:
        """Return ready keys and the bytes of their KV, least recently used first."""
        return self._rows("SELECT key, bytes FROM records WHERE state = 'ready' ORDER BY used")

    # -- what is stored -----------------------------------------------------------------------------------

    def mark_ready(self, key: str, nbytes: int) -> bool:
        """Note that a chunk's KV of ``nbytes`` is stored. False if the chunk is not (any more) known."""
        with self._transaction() as db:
            changed = db.execute(
                "UPDATE records SET state = 'ready', bytes = ? WHERE key = ?", (nbytes, key)
            ).rowcount
            if changed:
                db.execute("DELETE FROM doomed WHERE key = ?", (key,))
        return bool(changed)

    def mark(self, keys: Iterable[str], state: Literal["pending", "evicted"]) -> None:
        """Note that the KV of these chunks is gone, and whether it is wanted again."""
        with self._transaction() as db:
            _mark(db, keys, state)

    def evict(self, keys: Iterable[str], *, keep_ready: bool = False) -> None:
        """Note that the files of these chunks are about to be deleted: they are :meth:`doomed` from here on.

        keep_ready: their KV stays ready, because another tier has it.
        """
        keys = list(keys)
        with self._transaction() as db:
            if not keep_ready:
                _mark(db, keys, "evicted")
            _doom(db, keys, kept=keep_ready)

    def doomed(self) -> list[str]:
        """Return the keys whose files can be deleted, and were not before a crash."""
        return self._keys(
            "SELECT doomed.key FROM doomed LEFT JOIN records ON records.key = doomed.key"
            " WHERE kept OR state IS NULL OR state = 'evicted'"
        )

    def buried(self, keys: Iterable[str]) -> None:
        """Note that the files of doomed keys are gone."""
        with self._transaction() as db:
            db.executemany("DELETE FROM doomed WHERE key = ?", [(key,) for key in keys])

    # -- owners -------------------------------------------------------------------------------------------

    def register(
        self, owner: str, chunks: Iterable[Chunk | tuple[str, str, Ids]], *, heir: str | None = None
    ) -> list[str]:
        """Make these the owner's whole list of chunks.

        New chunks are pending. Returns the keys that nobody owns any more; their rows are gone. heir: an
        owner that gets the chunks which this one had and has no more; None: nobody does.
        """
        new = {chunk[0]: Chunk(*chunk) for chunk in chunks}
        keys = [(key,) for key in new]
        with self._transaction() as db:
            before = {key for (key,) in db.execute("SELECT key FROM owners WHERE owner = ?", (owner,))}
            _note_changes(db, [key for key in new if key not in before])
            for one in new.values():
                _insert(db, one)
            db.executemany("DELETE FROM forms WHERE key = ?", keys)  # a text of its own from now on
            # A chunk that was evicted is wanted again.
            db.executemany("UPDATE records SET state = 'pending' WHERE key = ? AND state = 'evicted'", keys)
            db.executemany("DELETE FROM doomed WHERE key = ?", keys)
            db.executemany("INSERT OR IGNORE INTO owners VALUES (?, ?)", [(owner, key) for key in new])
            left = before - new.keys() - _forms_of(db, list(new))
            if heir is not None:
                db.executemany("INSERT OR IGNORE INTO owners VALUES (?, ?)", [(heir, key) for key in left])
            return _disown(db, owner, left)

    def release(self, *owners: str) -> list[str]:
        """Forget owners, all or none. Returns the keys that nobody owns any more; their rows are gone."""
        orphans: list[str] = []
        with self._transaction() as db:
            for owner in owners:
                keys = {key for (key,) in db.execute("SELECT key FROM owners WHERE owner = ?", (owner,))}
                orphans += _disown(db, owner, keys)
        return orphans

    def only_of(self, *owners: str) -> list[str]:
        """Return the keys that nobody else owns: what :meth:`release` of them all would return."""
        return self._keys(
            f"SELECT DISTINCT key FROM owners AS own WHERE owner IN {_NAMED} AND NOT EXISTS"
            f" (SELECT 1 FROM owners AS other WHERE other.key = own.key AND other.owner NOT IN {_NAMED})",
            (named := _named(owners), named),
        )

    def chunks_of(self, owner: str) -> list[Chunk]:
        """Return the chunks of an owner, oldest first."""
        return self._select(f"WHERE key IN (SELECT key FROM owners WHERE owner = ?) AND {_NO_FORM}", (owner,))

    def texts_of(self, owner: str) -> set[str]:
        """Return the texts of an owner, without their forms."""
        owned = "SELECT text FROM owners JOIN chunks USING (key) WHERE owner = ?"
        return set(self._keys(f"{owned} AND {_NO_FORM}", (owner,)))

    def add_form(self, base: str, form: Chunk, most: int) -> bool:
        """Register another form of a chunk's text, for its owners. False if the chunk is gone or has ``most``
        forms, or the form is known."""
        with self._transaction() as db:
            ((owned, forms, known),) = db.execute(
                "SELECT (SELECT COUNT(*) FROM owners WHERE key = :base),"
                " (SELECT COUNT(*) FROM forms WHERE base = :base),"
                " (SELECT COUNT(*) FROM records WHERE key = :key)",
                {"base": base, "key": form.key},
            )
            if not owned or forms >= most or known:
                return False
            _note_changes(db, [form.key])
            _insert(db, form)
            db.execute("INSERT INTO forms VALUES (?, ?)", (form.key, base))
            db.execute("INSERT INTO owners SELECT owner, ? FROM owners WHERE key = ?", (form.key, base))
        return True

    def behind(self, keys: Iterable[str]) -> list[Chunk]:
        """Return the chunks whose KV has traces of these: prefilled behind them, or behind such chunks;
        oldest first, so each comes after the one it stands behind."""
        return self._select(
            "WHERE key IN (WITH RECURSIVE found(key) AS ("
            f"SELECT key FROM chunks WHERE after != '' AND after IN {_LISTED} UNION"
            " SELECT chunks.key FROM found JOIN chunks ON after = found.key AND after != ''"
            ") SELECT key FROM found)",
            (json.dumps(list(keys)),),
        )

    def ready_behind(self, keys: Iterable[str]) -> dict[str, str]:
        """Return, by those of ``keys`` whose KV is there, the key that each stands behind; "" for none."""
        ready = "SELECT key, after FROM chunks JOIN records USING (key) WHERE state = 'ready'"
        return dict(self._rows(f"{ready} AND key IN {_LISTED}", (json.dumps(list(keys)),)))

    def owners_of(self, keys: Iterable[str]) -> list[str]:
        """Return the owners of these chunks, each once, in the order of the first chunk that each has."""
        return self._keys(
            f"SELECT owner FROM owners JOIN chunks USING (key) WHERE key IN {_LISTED}"
            " GROUP BY owner ORDER BY MIN(number)",
            (json.dumps(list(keys)),),
        )

    def owners(self, prefix: str = "") -> dict[str, list[str]]:
        """Return chunk keys by owner, of the owners whose name begins with ``prefix``."""
        found: dict[str, list[str]] = {}
        query = f"SELECT owner, key FROM owners WHERE owner >= ? AND owner < ? || {_LAST}"
        for owner, key in self._rows(query, (prefix, prefix)):
            found.setdefault(owner, []).append(key)
        return found

    def owned(self, owners: Iterable[str]) -> set[str]:
        """Return those of ``owners`` that have chunks."""
        return set(
            self._keys(f"SELECT DISTINCT owner FROM owners WHERE owner IN {_NAMED}", (_named(owners),))
        )

    def kept(self, prefix: str) -> list[Kept]:
        """Return the chunks of the owners whose name begins with ``prefix``: those whose KV is not there yet
        first, then the most recently used."""
        rows = self._rows(
            "SELECT owner, key, state, tokens, bytes, uses FROM owners JOIN records USING (key)"
            f" WHERE owner >= ? AND owner < ? || {_LAST} ORDER BY state != 'pending', used DESC, key",
            (prefix, prefix),
        )
        return [Kept(*row) for row in rows]

    def collections(self, prefix: str, after: str, limit: int) -> tuple[dict[str, Totals], int]:
        """Return the totals of the first ``limit`` collections whose names begin with ``prefix`` and come
        after ``after``, by name; and how many begin so. Reads no chunk."""
        beginning = f"FROM collections WHERE name >= ? AND name < ? || {_LAST}"
        rows = self._rows(
            "SELECT name, chunks, ready, pending, chunks - ready - pending, tokens, bytes, documents"
            f" {beginning} AND name > ? ORDER BY name LIMIT ?",
            (prefix, prefix, after, limit),
        )
        ((total,),) = self._rows(f"SELECT COUNT(*) {beginning}", (prefix, prefix))
        return {name: Totals(*totals) for name, *totals in rows}, total

    def an_owner_of(self, keys: Iterable[str] | None = None) -> dict[str, str]:
        """Return one owner, always the same, of each of these chunks; None: of all chunks."""
        where, values = ("", ()) if keys is None else (f"WHERE key IN {_LISTED}", (json.dumps(list(keys)),))
        return dict(self._rows(f"SELECT key, MAX(owner) FROM owners {where} GROUP BY key", values))

    # -- usage --------------------------------------------------------------------------------------------

    def touch(self, uses: Mapping[str, tuple[int, int]]) -> None:
        """Note, by key, the time of the last use and the number of uses since the last note.

        The time is in any unit that grows. An earlier time than the one noted before, from a clock that was
        set back, is not believed.
        """
        with self._transaction() as db:
            db.executemany(
                "UPDATE records SET used = MAX(used, ?), uses = uses + ? WHERE key = ?",
                [(at, count, key) for key, (at, count) in uses.items()],
            )

    def count(self, tier: str, counts: Mapping[str, int]) -> None:
        """Add to a tier's counters, which outlive the process."""
        with self._transaction() as db:
            db.executemany(
                "INSERT INTO counters VALUES (?, ?, ?)"
                " ON CONFLICT DO UPDATE SET value = value + excluded.value",
                [(tier, name, by) for name, by in counts.items()],
            )

    def counters(self) -> dict[str, dict[str, int]]:
        """Return what was counted, by tier and name."""
        found: dict[str, dict[str, int]] = {}
        for tier, name, value in self._rows("SELECT tier, name, value FROM counters"):
            found.setdefault(tier, {})[name] = value
        return found

    def totals(self) -> Totals:
        """Return the totals of all chunks."""
        ((chunks, ready, pending, evicted, tokens, size),) = self._rows(
            "SELECT COUNT(*), IFNULL(SUM(state = 'ready'), 0), IFNULL(SUM(state = 'pending'), 0),"
            " IFNULL(SUM(state = 'evicted'), 0), IFNULL(SUM(tokens), 0), IFNULL(SUM(bytes), 0) FROM records"
        )
        ((owners,),) = self._rows("SELECT COUNT(*) FROM (SELECT DISTINCT owner FROM owners)")
        return Totals(chunks, ready, pending, evicted, tokens, size, owners)

    def reuse(self, limit: int) -> list[Reuse]:
        """Return the owners whose chunks were used most often, at most ``limit``."""
        rows = self._rows(
            "SELECT owner, COUNT(*), SUM(tokens), SUM(uses) AS total FROM owners JOIN records USING (key)"
            " GROUP BY owner ORDER BY total DESC, owner LIMIT ?",
            (limit,),
        )
        return [Reuse(*row) for row in rows]

    def _select(self, where: str, values: Sequence[str] = ()) -> list[Chunk]:
        rows = self._rows(
            "SELECT key, text, token_ids, context, after, state, bytes FROM chunks JOIN records USING (key)"
            f" {where} ORDER BY number",
            values,
        )
        return [
            Chunk(key, text, _unpacked(ids), _unpacked(context), *rest)
            for key, text, ids, context, *rest in rows
        ]

    def _among(self, keys: Iterable[str], condition: str) -> set[str]:
        query = f"SELECT key FROM records WHERE {condition} key IN {_LISTED}"
        return set(self._keys(query, (json.dumps(list(keys)),)))


def _named(owners: Iterable[str]) -> str:
    """Return names for a query: SQLite ends values of JSON at a NUL, which names may have."""
    return json.dumps([owner.replace("%", "%25").replace("\0", "%00") for owner in owners])


def _packed(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, "<i4").tobytes()


def _unpacked(ids: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(ids, "<i4").tolist())


def _insert(db: sqlite3.Connection, one: Chunk) -> None:
    """Add a chunk, unless it is there."""
    db.execute("INSERT OR IGNORE INTO records (key, tokens) VALUES (?, ?)", (one.key, len(one.token_ids)))
    row = one.key, one.text, _packed(one.token_ids), _packed(one.context), one.after
    columns = "key, text, token_ids, context, after"
    db.execute(f"INSERT OR IGNORE INTO chunks ({columns}) VALUES (?, ?, ?, ?, ?)", row)


def _mark(db: sqlite3.Connection, keys: Iterable[str], state: State) -> None:
    db.executemany("UPDATE records SET state = ?, bytes = 0 WHERE key = ?", [(state, key) for key in keys])


def _doom(db: sqlite3.Connection, keys: Iterable[str], *, kept: bool) -> None:
    """Note that the files of these keys are to be deleted. kept: their KV stays ready in another tier."""
    db.executemany("INSERT OR REPLACE INTO doomed VALUES (?, ?)", [(key, kept) for key in keys])


def _forms_of(db: sqlite3.Connection, keys: Sequence[str]) -> set[str]:
    """Return the forms of these chunks."""
    rows = db.execute(f"SELECT key FROM forms WHERE base IN {_LISTED}", (json.dumps(keys),))
    return {key for (key,) in rows}


def _disown(db: sqlite3.Connection, owner: str, keys: Collection[str]) -> list[str]:
    orphans = []
    for key in sorted(keys):
        db.execute("DELETE FROM owners WHERE owner = ? AND key = ?", (owner, key))
        if not db.execute("SELECT 1 FROM owners WHERE key = ? LIMIT 1", (key,)).fetchone():
            db.execute("DELETE FROM forms WHERE key = ? OR base = ?", (key, key))
            db.execute("DELETE FROM chunks WHERE key = ?", (key,))
            db.execute("DELETE FROM records WHERE key = ?", (key,))
            orphans.append(key)
    _doom(db, orphans, kept=False)
    _note_changes(db, keys)
    return orphans


def _note_changes(db: sqlite3.Connection, keys: Collection[str]) -> None:
    """Note that these chunks come, go or get other owners. The last change is always remembered, so numbers
    have no gaps."""
    if keys:
        db.executemany("INSERT INTO changes (key) VALUES (?)", [(key,) for key in keys])
        db.execute(
            "DELETE FROM changes WHERE number <= (SELECT MAX(number) FROM changes) - ?", (_REMEMBERED,)
        )
