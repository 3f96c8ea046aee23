"""Answers that are begun before they are asked for: the provisional documents of a retrieval that goes on may
turn out to be the final ones (RAGCache, section 5.3, algorithm 2)."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from blendrag.errors import BlendragError

if TYPE_CHECKING:
    from blendrag.chat.request import ChatRequest
    from blendrag.chat.turn import Turn

T = TypeVar("T")

_SHARE = 0.125  # weight of the latest prompt in the running mean
_VAIN = 0.25  # cost of an answer begun in vain, in TTFTs, added so that speculation has to pay clearly


class Speculation:
    """A request that may soon come, as :meth:`ChatModel.speculate` gives it. Thread-safe."""

    def __init__(self, request: ChatRequest, lock: threading.RLock | None = None) -> None:
        # A copy: messages may be changed in place before they are asked.
        self.request, self._lock = copy.deepcopy(request), lock or threading.RLock()
        self.turn: Turn | None = None
        """The answer, if it was begun, until it is adopted."""
        self.over = False
        self.at = time.perf_counter()

    @property
    def begun(self) -> bool:
        """Return whether the answer is under way, or done, and nobody has asked for it yet."""
        return self.turn is not None and not self.over

    def end(self) -> None:
        """Give up a request that will not come, unless its answer was adopted. Safe to call twice."""
        with self._lock:
            self.over = True
            if self.turn is not None:
                self.turn.cancel()


class Speculations:
    """The speculations of one chat: one at a time, ended by the next one and by any other prompt.
    Thread-safe.

    Whether answers are begun at all is measured, in seconds of time to first token. A prompt that was
    expected and came would have saved ``min(wait, TTFT)``. One that did not would have left the next one
    waiting for the rest of its prefill, as an engine's step cannot be interrupted. Answers are begun while
    that has paid in the running mean; it is learned from prompts whose answers were not begun, too.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._latest: Speculation | None = None
        self._saved_s = 0.0

    def expect(self, request: ChatRequest, begin: Callable[[ChatRequest, bool], Turn | None]) -> Speculation:
        """Expect a request. begin: gives the answer, under way, if it can; told whether a running one was
        ended for it."""
        with self._lock:
            latest, freed = self._latest, False
            if latest is not None:
                if not latest.over and latest.request == request:
                    return latest
                freed = latest.begun and latest.turn is not None and latest.turn.running
                latest.end()
            self._latest = expected = Speculation(request, self._lock)
            pays = self._saved_s > 0.0
        if pays:
            with contextlib.suppress(BlendragError):  # who asks will be told
                turn = begin(expected.request, freed)
                with self._lock:
                    expected.turn = turn
                    if expected.over:  # meanwhile
                        expected.end()
        return expected

    def turn(self, request: ChatRequest, make: Callable[[ChatRequest], Turn]) -> Turn:
        """Return a turn for a request that is asked now: the one that was begun for it, or another."""
        with self._lock:
            latest, self._latest = self._latest, None
            if latest is not None:
                came = not latest.over and latest.request == request
                waited_s = time.perf_counter() - latest.at
                latest.over, begun = True, latest.turn
                latest.turn = None
        if latest is None:
            return make(request)
        if begun is not None and came and not begun.failed:
            turn = begun
            turn.adopt()
        else:
            if begun is not None:
                begun.cancel()
            turn = make(request)
            turn.speculation = "none" if begun is None else "discarded"
        turn.on_first_token = lambda ttft_s: self._learn(came, waited_s, ttft_s)
        return turn

    def end(self) -> None:
        """Expect no request any more."""
        with self._lock:
            latest, self._latest = self._latest, None
            if latest is not None:
                latest.end()

    def _learn(self, came: bool, waited_s: float, ttft_s: float) -> None:
        saved = min(waited_s, ttft_s) if came else -max(ttft_s - waited_s, 0.0) - _VAIN * ttft_s
        with self._lock:
            self._saved_s += _SHARE * (saved - self._saved_s)

    def __reduce__(self) -> tuple[type[Speculations], tuple[()]]:
        return Speculations, ()  # of a chat that was pickled or copied


async def in_thread(work: Callable[[], T], undo: Callable[[T], Any]) -> T:
    """Run ``work`` in a thread. undo: told of a result that comes when nobody waits for it any more."""
    result = asyncio.ensure_future(asyncio.to_thread(work))

    def gone(done: asyncio.Future[T]) -> None:
        if not done.cancelled() and done.exception() is None:
            undo(done.result())

    try:
        return await asyncio.shield(result)
    except asyncio.CancelledError:
        result.add_done_callback(gone)
        raise
