"""A small index and archives: what export makes of it, and any others, by Python's own means."""

from __future__ import annotations

import io
import os
import pickle
import sqlite3
import tarfile
from collections.abc import Callable
from pathlib import Path

import xxhash

from blendrag.index.ledger import Ledger
from blendrag.store.maintenance.archive import Header, export_index
from blendrag.store.maintenance.closed_index import closed_index
from blendrag.store.tiers import TierSpec
from stores import IDENTITY, A, B, C, open_stack, register

Files = list[tuple[str, bytes]]

SEGMENT = "chroma/01234567-89ab-cdef-0123-456789abcdef"


def filled(root: Path) -> Path:
    """Two chunks with KV and one without, documents, and files like Chroma's."""
    register(root, [A, B, C])
    store = open_stack(root, TierSpec(kind="disk"))
    for chunk in (A, B):
        store.put(chunk.key, chunk.token_ids, chunk.kv)
    store.close()
    Ledger(root).close()
    (root / SEGMENT).mkdir(parents=True)
    (root / SEGMENT / "data_level0.bin").write_bytes(os.urandom(2_500_000))
    (root / SEGMENT / "index_metadata.pickle").write_bytes(pickle.dumps({"ids": ["a", "b"], "n": 3}))
    with sqlite3.connect(root / "chroma" / "chroma.sqlite3") as db:
        db.execute("CREATE TABLE embeddings (id TEXT)")
        db.execute("CREATE VIRTUAL TABLE words USING fts5(word)")
        db.execute("INSERT INTO words VALUES ('handbook')")
    db.close()
    return root


def exported(root: Path, file: Path, *, kv: bool = True) -> Path:
    with closed_index(root) as index:
        export_index(index, file, kv=kv)
    return file


def around(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def make_tar(
    folder: Path, files: Files, change: Callable[[tarfile.TarInfo], None] = lambda info: None
) -> Path:
    """Any archive at all, by Python's own means; ``change`` alters the header of the last file."""
    path = folder / "bad.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for number, (name, data) in enumerate(files, 1):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            if number == len(files):
                change(info)
            archive.addfile(info, io.BytesIO(data))
    return path


def with_manifest(files: Files, header: Header | None = None) -> Files:
    """A header before and a true manifest after: everything is right but the files."""
    size = sum(len(data) for _, data in files)
    header = header or Header("1", IDENTITY, None, True, len(files), size)
    files = [("blendrag.json", header.encode()), *files]
    lines = "".join(f"{xxhash.xxh3_128_hexdigest(data)} {len(data)} {name}\n" for name, data in files)
    return [*files, ("manifest.txt", lines.encode())]


def contents(archive: bytes) -> Files:
    """Up to the manifest, after which nothing is read."""
    files: Files = []
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            file = tar.extractfile(member)
            files.append((member.name, file.read() if file else b""))
            if member.name == "manifest.txt":
                break
    return files
