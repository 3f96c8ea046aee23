"""The policy that evicts the least frequently used chunk."""

from __future__ import annotations

from blendrag.eviction.counts import Counts
from blendrag.eviction.heap import IndexedHeap
from blendrag.eviction.interface import EvictionPolicy, MayLeave, Use, anything, register_policy


@register_policy("lfu")
class LFU(EvictionPolicy):
    """The policy by which the chunk that was used least often leaves first; of several, the one used longest
    ago.

    Nothing ages: what was popular once stays. That is LFU's known weakness, and why there is GDSF.
    """

    def __init__(self) -> None:
        self._heap = IndexedHeap()
        self._counts = Counts()

    def added(self, key: str, size: int, use: Use) -> None:
        count = self._counts.of(key)
        count.uses += 1
        self._heap.push(key, count.uses)

    def used(self, key: str, use: Use) -> None:
        if key in self._heap:
            self.added(key, 0, use)

    def removed(self, key: str) -> None:
        if self._heap.remove(key) is not None:
            self._counts.left(key)

    def victim(self, may_leave: MayLeave = anything) -> str | None:
        return self._heap.first(may_leave)
