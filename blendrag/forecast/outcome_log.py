"""What became of conversations, kept on this machine for the next training; only for those who ask for it.

A line per prompt: when it was, whose conversation, as a keyed hash whose key never leaves the file, and the
row that the predictor read, in half precision. Texts are not kept; but vectors do tell what they were about,
so the file is its owner's alone. Whether a conversation went on is not written: later lines show it.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from blendrag.errors import PredictorError
from blendrag.forecast.features import LAYOUT, VERSION, Rows
from blendrag.private import make_file, make_folder
from blendrag.store.sqlite import use_wal

CAPACITY = 100_000  # prompts; with MiniLM's rows 200 MB
ENDED_AFTER_S = 3600.0  # a conversation that was silent for so long does not go on

_SCHEMA = """
CREATE TABLE IF NOT EXISTS key (salt BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS prompts (
    id INTEGER PRIMARY KEY AUTOINCREMENT, conversation BLOB NOT NULL, at REAL NOT NULL, row BLOB NOT NULL
);
"""
_NEXT = """
SELECT conversation, row, at, LEAD(at) OVER (PARTITION BY conversation ORDER BY id)
FROM prompts WHERE length(row) = ? ORDER BY id
"""


@dataclass(frozen=True, slots=True, eq=False)
class Outcomes:
    """Rows [n, width], whether their conversations went on [n], and which ones they are [n]."""

    rows: Rows
    continues: npt.NDArray[np.bool_]
    conversations: list[str]


class OutcomeLog:
    """The log of rows that one embedder made, in ``folder``. It may be written in another thread than
    opened, and by several processes."""

    def __init__(self, folder: Path, embedder: str, capacity: int = CAPACITY) -> None:
        made_by = f"{VERSION}\0{embedder}\0{LAYOUT}"
        self.path = folder / f"outcomes-{xxhash.xxh3_64_hexdigest(made_by.encode())}.sqlite"
        self._capacity = capacity
        try:
            make_folder(folder)
            make_file(self.path)
            self._db = sqlite3.connect(self.path, timeout=5.0, check_same_thread=False)
            use_wal(self._db)
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_SCHEMA)
            with self._db:
                self._db.execute(
                    "INSERT INTO key SELECT ? WHERE NOT EXISTS (SELECT 1 FROM key)", (os.urandom(32),)
                )
            (self._salt,) = self._db.execute("SELECT salt FROM key").fetchone()
        except (OSError, sqlite3.Error) as error:
            raise PredictorError(f"cannot log outcomes in {str(self.path)!r}: {error}") from error

    def record(self, conversations: Sequence[str], at: Sequence[float], rows: Rows) -> None:
        """A line per prompt, in the order they came. The oldest leave where there are too many.

        at: seconds, any clock. Raises PredictorError.
        """
        halves = rows.astype("<f2")
        lines = [
            (self._hidden(conversation), when, half.tobytes())
            for conversation, when, half in zip(conversations, at, halves, strict=True)
        ]
        try:
            with self._db:
                self._db.executemany("INSERT INTO prompts (conversation, at, row) VALUES (?, ?, ?)", lines)
                self._db.execute(
                    "DELETE FROM prompts WHERE id <= (SELECT MAX(id) FROM prompts) - ?", (self._capacity,)
                )
        except sqlite3.Error as error:
            raise PredictorError(f"cannot log outcomes in {str(self.path)!r}: {error}") from error

    def outcomes(self, ended_after_s: float = ENDED_AFTER_S) -> Outcomes:
        """Prompts whose outcome is known, in the order they came.

        A conversation went on after a prompt if its next came within ``ended_after_s``, and ended if that
        time has passed by the clock of the last line. A clock that was set back leaves some outcomes open.
        Raises PredictorError for a log without any outcome.
        """
        try:
            last = self._db.execute("SELECT at, length(row) FROM prompts ORDER BY id DESC LIMIT 1").fetchone()
            now, length = last or (0.0, 0)
            lines = self._db.execute(_NEXT, (length,)).fetchall()
        except sqlite3.Error as error:
            raise PredictorError(f"cannot read the log {str(self.path)!r}: {error}") from error
        known = [
            (conversation, row, following is not None and following - at <= ended_after_s)
            for conversation, row, at, following in lines
            if following is not None or now - at > ended_after_s
        ]
        if not known:
            raise PredictorError(f"the log {str(self.path)!r} holds no outcomes yet")
        rows = np.frombuffer(b"".join(row for _, row, _ in known), dtype="<f2").reshape(len(known), -1)
        continues = np.array([went_on for *_, went_on in known], dtype=bool)
        return Outcomes(rows.astype(np.float32), continues, [whose.hex() for whose, *_ in known])

    def count(self) -> int:
        """Of prompts in it."""
        (prompts,) = self._db.execute("SELECT COUNT(*) FROM prompts").fetchone()
        return int(prompts)

    def close(self) -> None:
        self._db.close()

    def _hidden(self, conversation: str) -> bytes:
        return blake2b(conversation.encode(), key=self._salt, digest_size=16).digest()
