"""The pieces of a generation, passed from the engine's loop to their reader."""

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
    """The pieces of one generation, which goes on whether or not somebody reads them. They can be read once,
    from any thread or loop."""

    def __init__(self, begin: Callable[[Put], Future[None]]) -> None:
        """Begin the generation. begin: starts a task that passes each piece, in order, to the function it is
        given."""
        self._early: list[StreamItem] = []
        self._put: Put = self._early.append
        self._lock = threading.Lock()
        self._task = begin(self._give)

    @property
    def running(self) -> bool:
        """Return whether the generation is still going on."""
        return not self._task.done()

    @property
    def failed(self) -> bool:
        """Return whether the generation has failed, and nobody has read its pieces yet."""
        with self._lock:
            return any(isinstance(item, BaseException) for item in self._early)

    def cancel(self) -> None:
        """Stop the generation, if it has not ended."""
        self._task.cancel()

    def stream(self) -> Generator[Delta]:
        """Yield pieces as they come. Closing the iterator stops the generation."""
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
        """Do as :meth:`stream`, in any event loop."""
        items: asyncio.Queue[StreamItem] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(item: StreamItem) -> None:
            with contextlib.suppress(RuntimeError):  # the reader's loop is closed: nobody reads any more
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
