"""The log of what prompts used and what became of their conversations, kept on this machine if asked for.

A line per prompt: when it came, the tokens of its chunks in their order, and the row that the predictor read,
in half precision. Whether a conversation went on is not written: later lines show it. Stores, chunks and
conversations are named by keyed hashes whose key never leaves the file. Texts are not kept; but vectors do
tell what they were about, so the file is its owner's alone.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from blendrag.errors import PredictorError, StoreError
from blendrag.eviction.fitted import VERSION, evictor_folder
from blendrag.files.sqlite import connect, transaction
from blendrag.forecast.conversation import Window
from blendrag.forecast.features import Rows, Vector

CAPACITY = 100_000  # prompts; with MiniLM's rows 200 MB
ENDED_AFTER_S = 3600.0  # a conversation that was silent for so long does not go on

_SCHEMA = """
CREATE TABLE IF NOT EXISTS key (salt BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS prompts (
    id INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, store TEXT NOT NULL, chunks TEXT NOT NULL,
    conversation TEXT, made_by TEXT, row BLOB
);
"""
_NEXT = """
SELECT conversation, row, at, LEAD(at) OVER (PARTITION BY conversation ORDER BY id)
FROM prompts WHERE made_by = ? AND length(row) = ? ORDER BY id
"""
_LAST = "SELECT at, length(row) FROM prompts WHERE made_by = ? AND row NOT NULL ORDER BY id DESC LIMIT 1"
_BUSIEST = (
    "SELECT store FROM prompts WHERE chunks != '[]' GROUP BY store ORDER BY COUNT(*) DESC, store LIMIT 1"
)


def log_file(cache_dir: Path) -> Path:
    """Return the file of this user's log."""
    return evictor_folder(cache_dir) / "prompts.sqlite"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that was answered. at: seconds, when it came. chunks: keys and tokens, in its order.
    conversation, window: if it belongs to a conversation."""

    at: float
    chunks: tuple[tuple[str, int], ...] = ()
    conversation: str | None = None
    window: Window | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Outcomes:
    """The outcomes of prompts: rows [n, width], whether their conversations went on [n], and which
    conversations they are [n]."""

    rows: Rows
    continues: npt.NDArray[np.bool_]
    conversations: list[str]


class PromptLog:
    """The log of prompts. Several threads and processes may use it. Raises PredictorError, whatever goes
    wrong.

    make: whether to make it where there is none; else nothing is written to a file that is no log.
    """

    def __init__(self, path: Path, capacity: int = CAPACITY, *, make: bool = True) -> None:
        self.path, self._capacity = path, capacity
        self._lock = threading.Lock()  # over transactions, of which a connection has one at a time
        try:
            self._db = connect(path)
            if make:
                self._db.executescript(_SCHEMA)
                new = "INSERT INTO key SELECT ? WHERE NOT EXISTS (SELECT 1 FROM key)"
                self._db.execute(new, (os.urandom(32),))
            (self._salt,) = self._db.execute("SELECT salt FROM key").fetchone()
        except (StoreError, sqlite3.Error, TypeError) as error:  # the last: whoever began it was killed
            raise PredictorError(f"{str(path)!r} cannot be used as a log of prompts: {error}") from error

    def record(
        self, store: str, prompts: Sequence[Prompt], rows: Sequence[Vector | None], embedder: str = ""
    ) -> None:
        """Write a line per prompt, all or none. The oldest lines leave where there are too many. rows: what
        ``embedder`` made of the prompts' windows."""
        hidden, made_by = self._hidden(store), _made_by(embedder)
        lines = [
            (
                prompt.at,
                hidden,
                json.dumps([(self._hidden(key), size) for key, size in dict(prompt.chunks).items()]),
                None if prompt.conversation is None else self._hidden(prompt.conversation),
                made_by,
                None if row is None else row.astype("<f2").tobytes(),
            )
            for prompt, row in zip(prompts, rows, strict=True)
        ]
        columns = "at, store, chunks, conversation, made_by, row"
        insert = f"INSERT INTO prompts ({columns}) VALUES (?, ?, ?, ?, ?, ?)"
        try:
            with self._lock, transaction(self._db):
                self._db.executemany(insert, lines)
                self._db.execute(
                    "DELETE FROM prompts WHERE id <= (SELECT MAX(id) FROM prompts) - ?", (self._capacity,)
                )
        except sqlite3.Error as error:
            raise PredictorError(f"cannot log prompts in {str(self.path)!r}: {error}") from error

    def prompts(self) -> list[Prompt]:
        """Return the prompts with chunks, as they came, of the store that had most of them."""
        store = self._read(_BUSIEST)
        lines = self._read(
            "SELECT at, chunks, conversation FROM prompts WHERE store = ? AND chunks != '[]' ORDER BY at, id",
            *(store[0] if store else ("",)),
        )
        return [
            Prompt(at, tuple((key, size) for key, size in json.loads(chunks)), conversation)
            for at, chunks, conversation in lines
        ]

    def outcomes(self, embedder: str) -> Outcomes:
        """Return the prompts of conversations whose outcome is known, in the order they came, with
        ``embedder``'s rows.

        A conversation went on after a prompt if its next came within :data:`ENDED_AFTER_S`, and ended if that
        time has passed by the clock of the last line. A clock that was set back leaves some outcomes open.
        """
        made_by = _made_by(embedder)
        last = self._read(_LAST, made_by)
        now, length = last[0] if last else (0.0, 0)
        known = [
            (conversation, row, following is not None and following - at <= ENDED_AFTER_S)
            for conversation, row, at, following in self._read(_NEXT, made_by, length)
            if following is not None or now - at > ENDED_AFTER_S
        ]
        if not known:
            raise PredictorError(f"the log {str(self.path)!r} holds no outcomes yet")
        rows = np.frombuffer(b"".join(row for _, row, _ in known), dtype="<f2").reshape(len(known), -1)
        continues = np.array([went_on for *_, went_on in known], dtype=bool)
        return Outcomes(rows.astype(np.float32), continues, [conversation for conversation, *_ in known])

    def close(self) -> None:
        self._db.close()

    def _read(self, query: str, *values: object) -> list[Any]:
        try:
            return self._db.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise PredictorError(f"cannot read the log {str(self.path)!r}: {error}") from error

    def _hidden(self, name: str) -> str:
        return blake2b(name.encode(errors="surrogatepass"), key=self._salt, digest_size=8).hexdigest()


def _made_by(embedder: str) -> str:
    return f"{VERSION} {embedder}"
