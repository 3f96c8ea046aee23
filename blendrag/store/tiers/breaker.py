"""A circuit breaker: a server that failed is left alone for a while, so that one failure costs one wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Breaker:
    """A circuit breaker. Closed: calls may go ahead. ``failure`` opens it for ``cooldown_s``: none may. After
    that, one call, the probe, finds out whether the server is back: ``success`` closes it, ``failure`` opens
    it again.

    Thread-safe. A call that was admitted has to end in ``success`` or ``failure``. clock: seconds that never
    go backwards.
    """

    def __init__(self, cooldown_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._cooldown_s, self._clock = cooldown_s, clock
        self._lock = threading.Lock()
        self._until: float | None = None  # None: closed
        self._probing = False

    def admits(self) -> bool:
        """Return whether a call may be made now."""
        with self._lock:
            if self._until is None:
                return True
            if self._probing or self._clock() < self._until:
                return False
            self._probing = True
            return True

    def success(self) -> None:
        """Note that a call was answered."""
        with self._lock:
            self._until, self._probing = None, False

    def failure(self) -> None:
        """Note that a call was not answered, or not in a way that makes sense."""
        with self._lock:
            self._until, self._probing = self._clock() + self._cooldown_s, False
