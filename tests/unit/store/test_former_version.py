"""A folder as blendrag 0.1.0 made them in its first layout: opened as it is, and moved.

Written down by hand, in the words of that version: what is made with today's code would change with it.
"""

from __future__ import annotations

import json
import sqlite3
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blendrag.errors import StoreMismatchError
from blendrag.index.ledger import Ledger
from blendrag.serving.owners import owner_of
from blendrag.store.catalogue import Catalogue, Totals
from blendrag.store.contexts import Contexts
from blendrag.store.maintenance.closed_index import DATABASES, closed_index
from blendrag.store.maintenance.verify import Verifier
from blendrag.store.tiers import TierSpec
from stores import IDENTITY, Chunk, get, open_stack, put, same

KEY = "44575ab4f72a7765e632ded63b40fc5a"
FILE = f"kv/44/{KEY}.safetensors"
CHUNK = Chunk(KEY, (1, 2, 3), torch.arange(48.0).view(2, 2, 3, 1, 4).to(torch.bfloat16))

CATALOGUE = f"""
PRAGMA user_version = 2;
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
INSERT INTO meta VALUES ('dtype', 'bfloat16');
INSERT INTO meta VALUES ('identity', '{{"model": "tiny", "weights": "weights-1", "dtype": "bfloat16",
    "num_layers": 2, "num_kv_heads": 1, "head_size": 4, "codec": "raw", "prefix": "alone", "namespace": "",
    "layout": 2}}');
INSERT INTO records VALUES ('{KEY}', 'ready', 1132, 3, 1795372198167480615, 4);
INSERT INTO chunks VALUES (1, '{KEY}', 'text', X'010000000200000003000000');
INSERT INTO owners VALUES ('doc', '{KEY}');
INSERT INTO counters VALUES ('disk', 'puts', 1);
"""
CONTEXTS = """
ALTER TABLE chunks ADD COLUMN context BLOB NOT NULL DEFAULT X'';
PRAGMA user_version = 3;
"""
LEDGER = f"""
PRAGMA journal_mode = WAL;
CREATE TABLE documents (
    source       TEXT PRIMARY KEY,
    content_hash TEXT NOT NULL,
    fingerprint  TEXT NOT NULL,
    chunk_keys   TEXT NOT NULL,
    bytes        INTEGER NOT NULL,
    ingested_at  REAL NOT NULL
) STRICT;
INSERT INTO documents VALUES ('doc', 'h', 'chunk_tokens=512 chunk_overlap=0', '["{KEY}"]', 4, 1.0);
"""
VECTORS = """
    CREATE TABLE collections (id, name); INSERT INTO collections VALUES (1, 'chunks');
    CREATE TABLE segments (id, collection); INSERT INTO segments VALUES (1, 1);
    CREATE TABLE embeddings (segment_id); INSERT INTO embeddings VALUES (1);
"""
HEAD = (
    f'{{"__metadata__":{{"key":"{KEY}","identity":"787eb6569e63d00925f16f0048c51e9c","codec":"raw",'
    '"ids":"6bbf7429332bea48","rows":"b8a3fc8de98d13d0abfc7d9bbf329997"},'
    '"token_ids":{"dtype":"I32","shape":[3],"data_offsets":[0,12]},'
    '"layers":{"dtype":"U8","shape":[2,48],"data_offsets":[12,108]}}'
)


@pytest.fixture
def former(tmp_path: Path) -> Path:
    """An index of one document with one chunk."""
    root = tmp_path / "former"
    (root / FILE).parent.mkdir(parents=True)
    (root / "chroma").mkdir()
    for name, script in zip(DATABASES, (CATALOGUE, LEDGER, VECTORS), strict=True):
        db = sqlite3.connect(root / name)
        db.executescript(script)
        db.close()
    values = CHUNK.kv.contiguous().view(torch.uint8).numpy().tobytes()
    ids = bytes.fromhex("010000000200000003000000")
    (root / FILE).write_bytes((1016).to_bytes(8, "little") + HEAD.encode().ljust(1016) + ids + values)
    (root / "lock").touch()
    return root


def works(root: Path) -> None:
    """All of it is found, sound, and can be added to."""
    with closed_index(root) as index:
        report = Verifier(index).run()
        assert (report.records, report.problems) == (1, [])
        assert index.catalogue.counters() == {"disk": {"puts": 1}}
    ledger = Ledger(root)
    assert ledger._execute("SELECT chunk_keys FROM documents") == [(json.dumps([KEY]),)]
    ledger.close()
    store = open_stack(root, TierSpec(kind="disk"))
    assert same(get(store, CHUNK), CHUNK)
    assert put(store, CHUNK) == 1132
    store.close()


def test_folder_of_the_former_version_works(former: Path) -> None:
    works(former)


def test_folder_of_the_version_that_did_not_chain_keys_works(former: Path) -> None:
    db = sqlite3.connect(former / "catalogue.sqlite")
    db.executescript(CONTEXTS)
    db.close()
    works(former)
    catalogue = Catalogue.open(former, IDENTITY)
    chunks = Contexts(IDENTITY, (), 8).document([("a", (1,)), ("b", (2,))])
    assert catalogue.register("another", chunks) == []
    assert [entry.text for entry in catalogue.behind([chunks[0].key])] == ["b"]


def test_collections_of_a_former_version_are_counted(former: Path) -> None:
    db = sqlite3.connect(former / "catalogue.sqlite")
    owned = [(owner_of("a", "1"), KEY), (owner_of("a", "2"), KEY), (owner_of("b", "1"), KEY)]
    db.executemany("INSERT INTO owners VALUES (?, ?)", owned)
    db.commit()
    db.close()
    catalogue = Catalogue.open(former, IDENTITY)
    of_one = Totals(chunks=1, ready=1, pending=0, evicted=0, tokens=3, bytes=1132, owners=1)
    assert catalogue.collections("", "", 9) == ({"a": replace(of_one, owners=2), "b": of_one}, 2)
    assert sum(map(len, catalogue.owners().values())) == 4


def test_folder_that_is_packed_and_unpacked_elsewhere_works(former: Path, tmp_path: Path) -> None:
    """As docs/housekeeping.md moves an index."""
    with tarfile.open(tmp_path / "moved.tar", "w") as tar:
        tar.add(former, "copy")
    former.rename(tmp_path / "gone")
    with tarfile.open(tmp_path / "moved.tar") as tar:
        tar.extractall(tmp_path, filter="data")
    works(tmp_path / "copy")


def test_folder_of_an_older_layout_is_refused_with_the_remedy(former: Path) -> None:
    with sqlite3.connect(former / "catalogue.sqlite") as db:
        db.execute("PRAGMA user_version = 1")
    db.close()
    with pytest.raises(StoreMismatchError, match="another version of blendrag: ingest into a new folder"):
        Catalogue.open(former, IDENTITY)
