"""Prefetch: KV moves into memory while the prompt is still being made, and stops if the prompt goes without
it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass

from blendrag.load.loader import stay_aside
from blendrag.store.kv_reader import KVReader

_EXPIRE_S = 10.0  # a prompt that has not come by then will not come


@dataclass(slots=True)
class PrefetchStats:
    """Chunks asked for ahead of their prompt; those read; those that were not, since no prompt needed
    them."""

    asked: int = 0
    read: int = 0
    cancelled: int = 0


class Prefetcher:
    """Of one store. What one retrieval found is a batch, read in its order, one chunk at a time.
    Thread-safe."""

    def __init__(self, store: KVReader, expire_s: float = _EXPIRE_S) -> None:
        self._store, self._expire_s = store, expire_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="blendrag-prefetch", initializer=stay_aside)
        self._batches: list[dict[str, Future[None]]] = []
        self._stats = PrefetchStats()
        self._lock = threading.Lock()

    def begin(self, keys: Iterable[str]) -> None:
        """Begin to read what a retriever has found. Returns at once."""
        due = time.monotonic() + self._expire_s
        with self._lock:
            self._batches = [batch for batch in self._batches if not all(f.done() for f in batch.values())]
            batch = {key: self._thread.submit(self._read, key, due) for key in dict.fromkeys(keys)}
            self._batches.append(batch)
            self._stats.asked += len(batch)

    def arrived(self, keys: Iterable[str]) -> None:
        """A prompt with these chunks is here: batches that have one of them were its own, and end.

        What is being read for it at this moment is waited for; what was not begun is the loader's, or
        nobody's.
        """
        wanted, begun = set(keys), []
        with self._lock:
            for batch in [batch for batch in self._batches if wanted & batch.keys()]:
                self._batches.remove(batch)
                for key, read in batch.items():
                    if read.cancel():
                        self._stats.cancelled += 1
                    elif key in wanted:
                        begun.append(read)
        wait(begun)

    def stats(self) -> dict[str, int]:
        with self._lock:
            return asdict(self._stats)

    def close(self) -> None:
        """Stop; what is being read is read to its end."""
        self._thread.shutdown(cancel_futures=True)

    def _read(self, key: str, due: float) -> None:
        late = time.monotonic() > due
        if not late:
            self._store.prefetch(key)
        with self._lock:
            self._stats.cancelled += late
            self._stats.read += not late
