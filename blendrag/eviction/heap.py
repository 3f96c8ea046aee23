"""A min-heap whose keys can be moved and removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

_Entry = tuple[float, int, str]  # priority, how many were pushed before, key


class IndexedHeap:
    """A heap of keys by priority, the lowest first; of equal priorities the one that was pushed longest ago.

    An entry whose key was moved or removed stays until it comes first, or until most are such: then all of
    them go, which with a million keys takes half a second, once in a million calls. NaN is no priority.
    """

    def __init__(self) -> None:
        self._live: dict[str, _Entry] = {}
        self._heap: list[_Entry] = []
        self._pushed = 0

    def __contains__(self, key: str) -> bool:
        return key in self._live

    def push(self, key: str, priority: float) -> None:
        """Put the key in, or, if it is in already, move it to where ``priority`` belongs."""
        assert priority == priority, "NaN has no place in an order"
        self._pushed += 1
        self._live[key] = entry = (priority, self._pushed, key)
        heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._live) + 1024:
            self._heap = list(self._live.values())
            heapify(self._heap)

    def remove(self, key: str) -> float | None:
        """Take the key out. Returns its priority; None if it was not in."""
        entry = self._live.pop(key, None)
        return None if entry is None else entry[0]

    def peek(self) -> tuple[str, float] | None:
        """Return the first key and its priority; None if there is none."""
        entry = next(self._in_order(), None)
        return entry and (entry[2], entry[0])

    def first(self, wanted: Callable[[str], bool]) -> str | None:
        """Return the first wanted key, if there is one. O(k log k) for k entries that come before it."""
        return next((key for _, _, key in self._in_order() if wanted(key)), None)

    def _in_order(self) -> Iterator[_Entry]:
        """Yield the live entries, the first first, and leave them where they are."""
        heap, live = self._heap, self._live
        while heap and live.get(heap[0][2]) is not heap[0]:
            heappop(heap)
        ahead = [(heap[0], 0)] if heap else []
        while ahead:
            entry, place = heappop(ahead)
            if live.get(entry[2]) is entry:
                yield entry
            for child in range(2 * place + 1, min(2 * place + 3, len(heap))):
                heappush(ahead, (heap[child], child))
