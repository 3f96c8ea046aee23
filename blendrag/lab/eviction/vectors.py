"""Vectors of texts on disk, so that an interrupted training goes on and a second one is quick."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import xxhash

from blendrag.errors import PredictorError
from blendrag.forecast.features import Vector, VectorCache
from blendrag.private import make_file, make_folder

_AT_ONCE = 500  # below SQLite's limit of variables in a statement


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
