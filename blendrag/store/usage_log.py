"""A log of when chunks were used and what tiers were asked for: noted in memory, written in batches."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence

from blendrag.errors import StoreError
from blendrag.store.catalogue import Catalogue
from blendrag.store.tiers import Tier

_INTERVAL_S = 5.0
_LEVELS = ("chunks", "bytes")  # what a tier holds now; its other statistics grow


class UsageLog:
    """A log of uses. Thread-safe. A transaction per read would cost more than the read."""

    def __init__(self, catalogue: Catalogue, tiers: Sequence[Tier]) -> None:
        self._catalogue, self._tiers = catalogue, tiers
        self._uses: dict[str, tuple[int, int]] = {}
        self._now = 0  # the time of the last use
        self._counted: dict[str, dict[str, int]] = {}
        self._flushed = time.monotonic()
        self._lock = threading.Lock()

    def seen(self, key: str, uses: int = 0) -> None:
        """Note that a chunk is of interest now: it should not be the next to leave. uses: by how many
        prompts."""
        with self._lock:
            self._now = max(self._now + 1, time.time_ns())  # the clock may be set back
            _, times = self._uses.get(key, (0, 0))
            self._uses[key] = (self._now, times + uses)

    def due(self) -> bool:
        """Return whether it is time to flush; True once per interval."""
        if time.monotonic() - self._flushed <= _INTERVAL_S:
            return False
        self._flushed = time.monotonic()
        return True

    def flush(self) -> None:
        """Write what has been noted. If that fails it is forgotten: bookkeeping is not worth a request."""
        with self._lock:
            uses, self._uses = self._uses, {}
        with contextlib.suppress(StoreError):
            self._catalogue.touch(uses)
            for tier in self._tiers:
                now, before = tier.stats(), self._counted.get(tier.name, {})
                growth = {name: now[name] - before.get(name, 0) for name in now if name not in _LEVELS}
                self._catalogue.count(tier.name, {name: by for name, by in growth.items() if by})
                self._counted[tier.name] = now
