"""The calls to the eviction policies of a store: what they are told of prompts, and the time it takes."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from blendrag.eviction import Use
from blendrag.store.tiers import Tier
from blendrag.store.tiers.local import Forecast, LocalTier

_REMEMBERED = 65_536  # chunks that prompts used; earlier ones count as new again
_TIMED = 1024  # calls


class Policies:
    """The eviction policies of the tiers on this machine; other tiers have none. Thread-safe."""

    def __init__(self, tiers: Iterable[Tier]) -> None:
        self._tiers = [tier for tier in tiers if isinstance(tier, LocalTier)]
        self._known: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()
        self._times = {"used": _Times(), "forecast": _Times()}

    def used(self, prompt: Sequence[str], found: Iterable[str]) -> None:
        """Tell the policies that a prompt with these chunks, in its order, was asked for; ``found`` were
        there.

        The chunks are named from the prompt's end to its beginning: a prefix cache drops the end first, and
        so does a policy that goes by the order of calls.
        """
        with self._times["used"].taken():
            keys = list(dict.fromkeys(prompt))
            known, now, there = self._meet(keys), time.monotonic(), set(found)
            uses = [
                (key, Use(now, depth=depth, length=len(keys), known=known))
                for depth, key in enumerate(keys)
                if key in there
            ]
            uses.reverse()
            for tier in self._tiers:
                tier.used(uses)

    def forecast(self, forecasts: Sequence[Forecast]) -> None:
        """Tell the policies which conversations go on, as far as one can tell."""
        with self._times["forecast"].taken():
            for tier in self._tiers:
                tier.forecast(forecasts)

    def stats(self) -> dict[str, dict[str, float]]:
        """Return, by call, how many there were, how long they took in all, and times of the latest ``_TIMED``
        of them."""
        return {name: times.stats() for name, times in self._times.items()}

    def _meet(self, keys: Sequence[str]) -> int:
        """Return how many of a prompt's leading chunks earlier prompts have used, and note that this one uses
        all."""
        with self._lock:
            known = next((depth for depth, key in enumerate(keys) if key not in self._known), len(keys))
            for key in keys:
                self._known[key] = None
                self._known.move_to_end(key)
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return known


class _Times:
    """The time that calls took, waiting for locks included."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_TIMED)
        self._calls, self._seconds, self._worst = 0, 0.0, 0.0
        self._lock = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - begin
            with self._lock:
                self._latest.append(took)
                self._calls += 1
                self._seconds += took
                self._worst = max(self._worst, took)

    def stats(self) -> dict[str, float]:
        """Return calls, seconds, worst_ms: since the start; p50_ms, p99_ms: of the latest."""
        with self._lock:
            latest = sorted(self._latest)
            p50, p99 = (latest[int(share * (len(latest) - 1))] if latest else 0.0 for share in (0.5, 0.99))
            return {
                "calls": self._calls,
                "seconds": self._seconds,
                "p50_ms": 1e3 * p50,
                "p99_ms": 1e3 * p99,
                "worst_ms": 1e3 * self._worst,
            }
