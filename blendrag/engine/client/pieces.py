"""The pieces of a generation, from the engine's loop to whoever reads them."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import Future
from typing import Any

from blendrag.engine.client.generation import Delta

StreamItem = Delta | BaseException | None  # None: there are no more
Put = Callable[[StreamItem], Any]


class Pieces:
    """Of one generation, which goes on whether or not somebody reads. Read once, from any thread or loop."""

    def __init__(self, begin: Callable[[Put], Future[None]]) -> None:
        """begin: starts a task that gives the pieces, in order, to what it is told."""
        self._early: list[StreamItem] = []
        self._put: Put = self._early.append
        self._lock = threading.Lock()
        self._task = begin(self._give)

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return not self._task.done()

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error, and nobody has read yet."""
        with self._lock:
            return any(isinstance(item, BaseException) for item in self._early)

    def cancel(self) -> None:
        """Stop the generation, if it has not ended."""
        self._task.cancel()

    def stream(self) -> Generator[Delta]:
        """Pieces as they come. Closing the iterator stops the generation."""
        items: queue.Queue[StreamItem] = queue.Queue()
        self._read_by(items.put)
        try:
            while (item := items.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.cancel()

    async def astream(self) -> AsyncGenerator[Delta]:
        """``stream`` for any event loop."""
        items: asyncio.Queue[StreamItem] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(item: StreamItem) -> None:
            with contextlib.suppress(RuntimeError):  # its loop is closed: nobody reads any more
                loop.call_soon_threadsafe(items.put_nowait, item)

        self._read_by(put)
        try:
            while (item := await items.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.cancel()

    def _give(self, item: StreamItem) -> None:
        with self._lock:
            self._put(item)

    def _read_by(self, put: Put) -> None:
        with self._lock:
            for item in self._early:
                put(item)
            self._early.clear()
            self._put = put
