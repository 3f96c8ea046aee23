"""The catalogue's tables, their version, and the identity that a catalogue was made with."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import asdict, fields
from pathlib import Path

from blendrag.errors import StoreMismatchError
from blendrag.store.identity import KVIdentity

SEPARATOR = "\x1f"
"""The mark between the name of a collection and that of a document, in an owner's name: char(31) in SQL."""

_VERSION = 7
_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE records (
    key TEXT PRIMARY KEY, state TEXT NOT NULL DEFAULT 'pending', bytes INTEGER NOT NULL DEFAULT 0,
    tokens INTEGER NOT NULL, used INTEGER NOT NULL DEFAULT 0, uses INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;
CREATE INDEX records_pending ON records(state) WHERE state = 'pending';
CREATE TABLE chunks (
    number INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, text TEXT NOT NULL, token_ids BLOB NOT NULL,
    context BLOB NOT NULL DEFAULT X'', after TEXT NOT NULL DEFAULT ''
) STRICT;
CREATE INDEX chunks_after ON chunks(after) WHERE after != '';
CREATE TABLE owners (
    owner TEXT NOT NULL, key TEXT NOT NULL REFERENCES records(key), PRIMARY KEY (owner, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX owners_by_key ON owners(key);
CREATE TABLE forms (
    key TEXT PRIMARY KEY REFERENCES records(key), base TEXT NOT NULL REFERENCES records(key)
) STRICT, WITHOUT ROWID;
CREATE INDEX forms_of ON forms(base);
CREATE TABLE changes (number INTEGER PRIMARY KEY, key TEXT NOT NULL) STRICT;
CREATE TABLE doomed (key TEXT PRIMARY KEY, kept INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE counters (
    tier TEXT NOT NULL, name TEXT NOT NULL, value INTEGER NOT NULL, PRIMARY KEY (tier, name)
) STRICT, WITHOUT ROWID;
"""
# Figures of collections, kept with every change: adding them up would take a look at every chunk. One counts
# once, however many documents of a collection have it.
_COLLECTION = "SUBSTR({0}.owner, 1, INSTR({0}.owner, char(31)) - 1)"
_COUNTED = """
CREATE TRIGGER collections_{event} AFTER {event} ON owners WHEN INSTR({row}.owner, char(31)) BEGIN
    INSERT OR IGNORE INTO collections (name) VALUES ({name});
    UPDATE collections SET documents = documents {sign} 1 WHERE name = {name}
        AND NOT EXISTS (SELECT 1 FROM owners WHERE owner = {row}.owner AND key != {row}.key);
    UPDATE collections SET chunks = chunks {sign} 1, ready = ready {sign} (state = 'ready'),
        pending = pending {sign} (state = 'pending'), tokens = collections.tokens {sign} one.tokens,
        bytes = collections.bytes {sign} one.bytes
        FROM records AS one WHERE one.key = {row}.key AND name = {name} AND NOT EXISTS (
            SELECT 1 FROM owners WHERE key = {row}.key AND owner != {row}.owner
            AND owner >= {name} || char(31) AND owner < {name} || char(32));
    DELETE FROM collections WHERE name = {name} AND documents = 0;
END"""
_COLLECTIONS = [
    "CREATE TABLE collections (name TEXT PRIMARY KEY, documents INTEGER NOT NULL DEFAULT 0,"
    " chunks INTEGER NOT NULL DEFAULT 0, ready INTEGER NOT NULL DEFAULT 0,"
    " pending INTEGER NOT NULL DEFAULT 0, tokens INTEGER NOT NULL DEFAULT 0,"
    " bytes INTEGER NOT NULL DEFAULT 0) STRICT, WITHOUT ROWID",
    _COUNTED.format(event="INSERT", row="new", sign="+", name=_COLLECTION.format("new")),
    _COUNTED.format(event="DELETE", row="old", sign="-", name=_COLLECTION.format("old")),
    "CREATE TRIGGER collections_state AFTER UPDATE OF state, bytes ON records"
    " WHEN old.state != new.state OR old.bytes != new.bytes BEGIN"
    " UPDATE collections SET ready = ready + (new.state = 'ready') - (old.state = 'ready'),"
    " pending = pending + (new.state = 'pending') - (old.state = 'pending'),"
    f" bytes = bytes + new.bytes - old.bytes WHERE name IN (SELECT {_COLLECTION.format('owners')} FROM owners"
    " WHERE key = new.key AND INSTR(owner, char(31))); END",
]
_SINCE = {  # what the next version has, by version
    2: ["ALTER TABLE chunks ADD COLUMN context BLOB NOT NULL DEFAULT X''"],
    3: [
        "ALTER TABLE chunks ADD COLUMN after TEXT NOT NULL DEFAULT ''",
        "CREATE INDEX chunks_after ON chunks(after) WHERE after != ''",
    ],
    4: ["CREATE TABLE changes (number INTEGER PRIMARY KEY, key TEXT NOT NULL) STRICT"],
    5: [
        "CREATE TABLE forms (key TEXT PRIMARY KEY REFERENCES records(key),"
        " base TEXT NOT NULL REFERENCES records(key)) STRICT, WITHOUT ROWID",
        "CREATE INDEX forms_of ON forms(base)",
    ],
    6: [
        "CREATE TABLE former AS SELECT * FROM owners",
        "DELETE FROM owners",
        *_COLLECTIONS,
        "INSERT INTO owners SELECT * FROM former",
        "DROP TABLE former",
    ],
}


def create(db: sqlite3.Connection, identity: KVIdentity) -> None:
    """Make the tables, unless there are any."""
    if not db.execute("SELECT 1 FROM sqlite_schema").fetchone():
        for statement in [*_SCHEMA.split(";\n"), *_COLLECTIONS]:
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {_VERSION}")
        db.execute("INSERT INTO meta VALUES ('identity', ?)", (json.dumps(asdict(identity)),))


def stored_identity(db: sqlite3.Connection, root: Path) -> KVIdentity:
    """Return the identity that a catalogue was made with. A catalogue of a former version is brought to this
    one.

    Raises StoreMismatchError for those of other versions.
    """
    (version,) = db.execute("PRAGMA user_version").fetchone()
    while version in _SINCE:
        for statement in _SINCE[version]:
            db.execute(statement)
        version += 1
        db.execute(f"PRAGMA user_version = {version}")
    if version != _VERSION:
        raise _made_by_another_version(root)
    (stored,) = db.execute("SELECT value FROM meta WHERE name = 'identity'").fetchone()
    try:
        values = json.loads(stored)
        identity = KVIdentity(**values)
    except (TypeError, ValueError):
        raise _made_by_another_version(root) from None
    if set(values) != {field.name for field in fields(KVIdentity)}:
        raise _made_by_another_version(root)  # no default can replace a field that it does not name
    return identity


def mismatch(root: Path, stored: KVIdentity, identity: KVIdentity) -> StoreMismatchError:
    """Return the error that names what differs, and the remedy."""
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
    """Return what a user has set to get this."""
    if name == "prefix":
        return f"shared_prefix={identity.prefix_kind!r}"
    return f"{name}={getattr(identity, name)!r}"


def _made_by_another_version(root: Path) -> StoreMismatchError:
    return StoreMismatchError(
        f"the index {str(root)!r} was made by another version of blendrag: ingest into a new folder"
    )
