"""Greedy-Dual-Size-Frequency, RAGCache's version of it for prefixes (section 5.1), and LFU."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from blendrag.eviction.heap import IndexedHeap
from blendrag.eviction.interface import EvictionPolicy, MayLeave, Use, anything, register_policy

_LEAST = 1024


@dataclass(slots=True)
class Count:
    """The counts of one chunk. uses: all its uses. computed: uses for which it had to be computed. costs: the
    costs of those, in seconds per unit of size, added up."""

    uses: int = 0
    computed: int = 0
    costs: float = 0.0


class Counts:
    """The counts of the chunks that are held, and of a multiple of that number that left last.

    A frequency that began anew with every return would make a chunk that comes and goes look new each time.
    RAGCache counts within a window of time (section 5.1); this window is one of chunks, so that memory is
    bounded whatever the rate.
    """

    def __init__(self, times: int = 4) -> None:
        self._times = times
        self._held: dict[str, Count] = {}
        self._left: OrderedDict[str, Count] = OrderedDict()

    def of(self, key: str) -> Count:
        """Return the record of a chunk that is held from now on."""
        seen = self._held.get(key)
        if seen is None:
            seen = self._held[key] = self._left.pop(key) if key in self._left else Count()
        return seen

    def left(self, key: str) -> None:
        """Note that the chunk is no longer held."""
        seen = self._held.pop(key, None)
        if seen is not None:
            self._left[key] = seen
            while len(self._left) > max(_LEAST, self._times * len(self._held)):
                self._left.popitem(last=False)


@register_policy("gdsf")
class GDSF(EvictionPolicy):
    """A policy by Priority = Clock + Frequency * Cost / Size (eq. 1); the lowest leaves first.

    The clock is the highest priority of what was evicted so far (eq. 2), so that what is not used any more
    is overtaken in the end. A chunk takes the clock's time when it is used. Cost is taken to grow with size,
    as prefill of a chunk does: Cost / Size is the same for all.
    """

    ages = True

    def __init__(self) -> None:
        self._heap = IndexedHeap()
        self._counts = Counts()
        self._aging = 0.0  # "Clock": it has nothing to do with time
        self._named: str | None = None

    def added(self, key: str, size: int, use: Use) -> None:
        self._use(key, self._counts.of(key), use)

    def used(self, key: str, use: Use) -> None:
        if key in self._heap:
            self._use(key, self._counts.of(key), use)

    def removed(self, key: str) -> None:
        priority = self._heap.remove(key)
        if priority is not None:
            if self.ages and key == self._named:  # evicted: a deletion by its owner tells no priority
                self._aging = max(self._aging, priority)
                self._named = None
            self._counts.left(key)

    def victim(self, may_leave: MayLeave = anything) -> str | None:
        self._named = self._heap.first(may_leave)
        return self._named

    def _use(self, key: str, count: Count, use: Use) -> None:
        count.uses += 1
        self._heap.push(key, self._aging + count.uses * self._cost_per_size(count, use))

    def _cost_per_size(self, count: Count, use: Use) -> float:
        return 1.0


@register_policy("pgdsf")
class PGDSF(GDSF):
    """The policy GDSF with the cost that computing the chunk had.

    Cost / Size is the mean of Cost_i / NewSize_i over the uses that did not find the chunk (eq. 3): the same
    chunk costs more behind a long prefix, and less if others are computed with it. A chunk whose cost nobody
    knows has the mean of all; where none is known, this is GDSF.
    """

    def __init__(self) -> None:
        super().__init__()
        self._all = Count()

    def _cost_per_size(self, count: Count, use: Use) -> float:
        if use.cost is not None and 0.0 <= use.cost < float("inf"):
            for one in (count, self._all):
                one.computed += 1
                one.costs += use.cost
        known = count if count.computed else self._all
        return known.costs / known.computed if known.computed else 1.0


@register_policy("lfu")
class LFU(GDSF):
    """The policy by which the chunk that was used least often leaves first; of several, the one used longest
    ago.

    Nothing ages: what was popular once stays. That is LFU's known weakness, and why there is GDSF.
    """

    ages = False
