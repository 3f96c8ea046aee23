"""The prefetch: KV moves into memory while the prompt is made; it stops if the prompt does without it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from blendrag.load.loader import stay_aside
from blendrag.store.kv_reader import KVReader

_EXPIRE_S = 10.0  # a prompt that has not come by then will not come


class Prefetcher:
    """The prefetch of one store. The chunks of one retrieval are a batch, read in its order, one at a time.
    Thread-safe."""

    def __init__(self, store: KVReader, expire_s: float = _EXPIRE_S) -> None:
        self._store, self._expire_s = store, expire_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="blendrag-prefetch", initializer=stay_aside)
        self._batches: list[dict[str, Future[None]]] = []
        self._stats = {"asked": 0, "read": 0, "cancelled": 0}
        self._lock = threading.Lock()

    def begin(self, keys: Iterable[str]) -> None:
        """Begin to read what a retriever has found. Returns at once."""
        due = time.monotonic() + self._expire_s
        with self._lock:
            self._batches = [batch for batch in self._batches if not all(f.done() for f in batch.values())]
            batch = {key: self._thread.submit(self._read, key, due) for key in dict.fromkeys(keys)}
            self._batches.append(batch)
            self._stats["asked"] += len(batch)

    def arrived(self, keys: Iterable[str]) -> None:
        """Note that a prompt with these chunks is here. Batches that have one of them were for it, and end.

        A chunk that is being read for it at this moment is waited for. One that was not begun is left to the
        loader, or to nobody.
        """
        wanted, begun = set(keys), []
        with self._lock:
            for batch in [batch for batch in self._batches if wanted & batch.keys()]:
                self._batches.remove(batch)
                for key, read in batch.items():
                    if read.cancel():
                        self._stats["cancelled"] += 1
                    elif key in wanted:
                        begun.append(read)
        wait(begun)

    def stats(self) -> dict[str, int]:
        """Return the numbers of chunks asked for ahead of their prompt, of those read, and of those that were
        not read, since no prompt needed them."""
        with self._lock:
            return dict(self._stats)

    def close(self) -> None:
        """Stop, after reading to its end what is being read."""
        self._thread.shutdown(cancel_futures=True)

    def _read(self, key: str, due: float) -> None:
        late = time.monotonic() > due
        if not late:
            self._store.prefetch(key)
        with self._lock:
            self._stats["cancelled" if late else "read"] += 1
