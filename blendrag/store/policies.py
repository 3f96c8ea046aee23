"""The calls to the eviction policies of a store: what they are told of prompts, and the time it takes."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from blendrag.eviction import Use
from blendrag.store.tiers import Tier
from blendrag.store.tiers.local import Forecast, LocalTier

_REMEMBERED = 65_536  # keys; earlier ones count as new again


class Seen:
    """The keys that prompts had lately. Thread-safe."""

    def __init__(self) -> None:
        self._keys: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def meet(self, keys: Sequence[str]) -> int:
        """Note a prompt's keys. Returns how many of the first ones earlier prompts had."""
        with self._lock:
            known = next((at for at, key in enumerate(keys) if key not in self._keys), len(keys))
            for key in keys:
                self._keys[key] = None
                self._keys.move_to_end(key)
            while len(self._keys) > _REMEMBERED:
                self._keys.popitem(last=False)
        return known


class Policies:
    """The eviction policies of the tiers on this machine; other tiers have none. Thread-safe."""

    def __init__(self, tiers: Iterable[Tier]) -> None:
        self._tiers = [tier for tier in tiers if isinstance(tier, LocalTier)]
        self._known = Seen()
        self._times = {"used": _Times(), "forecast": _Times()}

    def used(self, prompt: Sequence[str], found: Iterable[str]) -> None:
        """Tell the policies that a prompt with these chunks, in its order, was asked for; ``found`` were
        there.

        The chunks are named from the prompt's end to its beginning: a prefix cache drops the end first, and
        so does a policy that goes by the order of calls.
        """
        with self._times["used"].taken():
            keys = list(dict.fromkeys(prompt))
            known, now, there = self._known.meet(keys), time.monotonic(), set(found)
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
        """Return, by call, how many there were, and how long they took."""
        return {name: times.stats() for name, times in self._times.items()}


class _Times:
    """The time that calls took, waiting for locks included: how many there were, their seconds, and the
    milliseconds of the longest."""

    def __init__(self) -> None:
        self._stats = {"calls": 0, "seconds": 0.0, "worst_ms": 0.0}
        self._lock = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - begin
            with self._lock:
                self._stats["calls"] += 1
                self._stats["seconds"] += took
                self._stats["worst_ms"] = max(self._stats["worst_ms"], 1e3 * took)

    def stats(self) -> dict[str, float]:
        with self._lock:
            return dict(self._stats)
