"""Vectors of texts, kept by the texts' hashes, so that no text is embedded twice."""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from blendrag.errors import PredictorError
from blendrag.private import make_file, make_folder

Vector = npt.NDArray[np.float32]

_AT_ONCE = 500  # below SQLite's limit of variables in a statement


class VectorCache(ABC):
    """Vectors [dimension] by key (``key_of``)."""

    @abstractmethod
    def get(self, keys: Iterable[bytes]) -> dict[bytes, Vector]:
        """Those of the vectors that are there."""

    @abstractmethod
    def put(self, vectors: Mapping[bytes, Vector]) -> None:
        """Keep these too."""


def key_of(text: str) -> bytes:
    """16 bytes that stand for a text."""
    return xxhash.xxh3_128_digest(text.encode())


class MemoryCache(VectorCache):
    """The latest ``capacity`` vectors: a conversation's earlier prompts are known when the next comes."""

    def __init__(self, capacity: int = 10_000) -> None:
        self._capacity = capacity
        self._vectors: OrderedDict[bytes, Vector] = OrderedDict()

    def get(self, keys: Iterable[bytes]) -> dict[bytes, Vector]:
        found = {key: self._vectors[key] for key in keys if key in self._vectors}
        for key in found:
            self._vectors.move_to_end(key)
        return found

    def put(self, vectors: Mapping[bytes, Vector]) -> None:
        self._vectors.update(vectors)
        while len(self._vectors) > self._capacity:
            self._vectors.popitem(last=False)


class DiskCache(VectorCache):
    """A SQLite file per embedder below ``folder``. What was put stays when the process is killed."""

    def __init__(self, folder: Path, embedder: str) -> None:
        path = folder / f"vectors-{xxhash.xxh3_64_hexdigest(embedder.encode())}.sqlite"
        try:
            make_folder(folder)
            make_file(path)
            self._db = sqlite3.connect(path, isolation_level=None, timeout=30.0)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS vectors (key BLOB PRIMARY KEY, vector BLOB NOT NULL)"
            )
        except (OSError, sqlite3.Error) as error:
            raise PredictorError(f"cannot keep vectors in {str(path)!r}: {error}") from error

    def get(self, keys: Iterable[bytes]) -> dict[bytes, Vector]:
        wanted, found = list(keys), {}
        for start in range(0, len(wanted), _AT_ONCE):
            part = wanted[start : start + _AT_ONCE]
            marks = ",".join("?" * len(part))
            for key, vector in self._db.execute(
                f"SELECT key, vector FROM vectors WHERE key IN ({marks})", part
            ):
                found[key] = np.frombuffer(vector, dtype="<f4")
        return found

    def put(self, vectors: Mapping[bytes, Vector]) -> None:
        rows = [(key, vector.astype("<f4").tobytes()) for key, vector in vectors.items()]
        try:
            self._db.execute("BEGIN")
            self._db.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?)", rows)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise PredictorError(f"cannot keep vectors: {error}") from error

    def close(self) -> None:
        self._db.close()
