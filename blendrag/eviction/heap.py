"""A min-heap whose keys can be moved and removed."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable
from itertools import compress

_CHILDREN = 16  # as many doubles as fill two cache lines: measured against 8 and 32


class IndexedHeap:
    """A heap of keys by priority, the lowest first; of equal priorities the one that was pushed longest ago.

    Unlike a lazily cleaned heap it holds each key once, so that no call costs more than O(log n). With a
    million keys the time goes into memory that is not in the processor's cache. Hence flat arrays, and 16
    children to a place: five levels, at each of which one run of priorities is read. NaN is no priority.
    """

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}  # a key has a slot as long as it is held
        self._keys: list[str] = []  # by slot
        self._places = array("q")  # by slot
        self._free: list[int] = []
        self._priorities = array("d")  # by place, as the two below
        self._turns = array("q")  # how many were pushed before
        self._heap = array("q")  # slots
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._heap)

    def __contains__(self, key: str) -> bool:
        return key in self._slots

    def push(self, key: str, priority: float) -> None:
        """Put the key in, or, if it is in already, move it to where ``priority`` belongs."""
        assert priority == priority, "NaN has no place in an order"
        self._pushed += 1
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = self._new_slot(key)
            place = len(self._heap)
            self._heap.append(slot)
            self._priorities.append(priority)
            self._turns.append(self._pushed)
            self._rise(place, priority, self._pushed, slot)
        else:
            place = self._places[slot]
            move = self._rise if priority < self._priorities[place] else self._sink
            move(place, priority, self._pushed, slot)

    def remove(self, key: str) -> float | None:
        """Take the key out. Returns its priority; None if it was not in."""
        slot = self._slots.pop(key, None)
        if slot is None:
            return None
        self._keys[slot] = ""
        self._free.append(slot)
        place = self._places[slot]
        priority = self._priorities[place]
        last = self._priorities.pop(), self._turns.pop(), self._heap.pop()
        if last[-1] != slot:  # the last one fills the gap
            parent = (place - 1) // _CHILDREN
            rises = place and last[:2] < (self._priorities[parent], self._turns[parent])
            (self._rise if rises else self._sink)(place, *last)
        return priority

    def peek(self) -> tuple[str, float] | None:
        """Return the first key and its priority; None if there is none."""
        return (self._keys[self._heap[0]], self._priorities[0]) if self._heap else None

    def first(self, wanted: Callable[[str], bool]) -> str | None:
        """Return the first wanted key, if there is one. O(k log k) for k keys that come before it."""
        ahead = [(self._priorities[0], self._turns[0], 0)] if self._heap else []
        while ahead:
            _, _, place = heapq.heappop(ahead)
            key = self._keys[self._heap[place]]
            if wanted(key):
                return key
            begin = _CHILDREN * place + 1
            for child in range(begin, min(begin + _CHILDREN, len(self._heap))):
                heapq.heappush(ahead, (self._priorities[child], self._turns[child], child))
        return None

    def _new_slot(self, key: str) -> int:
        if self._free:
            slot = self._free.pop()
            self._keys[slot] = key
            return slot
        self._keys.append(key)
        self._places.append(0)
        return len(self._keys) - 1

    def _rise(self, place: int, priority: float, turn: int, slot: int) -> None:
        """Put the entry at ``place`` or at an ancestor's, which then moves down."""
        priorities, turns = self._priorities, self._turns
        while place:
            parent = (place - 1) // _CHILDREN
            above = priorities[parent]
            if above < priority or (above == priority and turns[parent] < turn):
                break
            self._put(place, above, turns[parent], self._heap[parent])
            place = parent
        self._put(place, priority, turn, slot)

    def _sink(self, place: int, priority: float, turn: int, slot: int) -> None:
        """Put the entry at ``place`` or at a descendant's, which then moves up."""
        priorities, turns, heap, places = self._priorities, self._turns, self._heap, self._places
        while group := priorities[(first := _CHILDREN * place + 1) : first + _CHILDREN].tolist():
            below = min(group)
            if below > priority:
                break
            alike = group.count(below)
            if alike == 1:
                child = first + group.index(below)
            else:  # no loop in Python: where many are alike, every eviction comes here, too
                waited = turns[first : first + _CHILDREN].tolist()
                ties = waited if alike == len(group) else compress(waited, map(below.__eq__, group))
                child = first + waited.index(min(ties))
            if below == priority and turns[child] > turn:
                break
            # _put, written out: every eviction comes by here five times
            moved = heap[child]
            priorities[place], turns[place], heap[place], places[moved] = below, turns[child], moved, place
            place = child
        self._put(place, priority, turn, slot)

    def _put(self, place: int, priority: float, turn: int, slot: int) -> None:
        self._priorities[place], self._turns[place], self._heap[place] = priority, turn, slot
        self._places[slot] = place
