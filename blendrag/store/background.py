"""Work that nobody waits for, on a thread of its own, bounded by the bytes it keeps in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class Background:
    """Runs what it is given in order. What is given when more than ``most`` bytes wait is waited for, or
    left."""

    def __init__(self, name: str, most: int) -> None:
        self._most, self._waiting = most, 0
        self._room = threading.Condition()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"blendrag-{name}")

    def do(self, work: Callable[[], object], nbytes: int = 0) -> None:
        """Run ``work``, which keeps ``nbytes`` in memory, later; first wait for room for it."""
        with self._room:
            self._room.wait_for(lambda: self._fits(nbytes))
            self._begin(work, nbytes)

    def do_if_room(self, work: Callable[[], object], nbytes: int = 0) -> bool:
        """Run ``work`` later; False, and nothing done, if there is no room for it now."""
        with self._room:
            if not self._fits(nbytes):
                return False
            self._begin(work, nbytes)
            return True

    def wait(self) -> None:
        """Until everything given so far is done."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Do what was given, and end."""
        self._thread.shutdown()

    def _fits(self, nbytes: int) -> bool:
        return not self._waiting or self._waiting + nbytes <= self._most

    def _begin(self, work: Callable[[], object], nbytes: int) -> None:
        self._waiting += nbytes
        self._thread.submit(self._run, work, nbytes)

    def _run(self, work: Callable[[], object], nbytes: int) -> None:
        try:
            work()
        finally:
            with self._room:
                self._waiting -= nbytes
                self._room.notify_all()
