"""The chunks of a cache in two orders at once: by what a model expects of them, and by age."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from blendrag.eviction.heap import IndexedHeap
from blendrag.eviction.interface import MayLeave, anything

_AT_ONCE = 4  # chunks that move to an older age in one call, at most


@dataclass(slots=True)
class _Chunk:
    """A chunk. levels: one for each step of age. at: of its last use. step: the one that it has reached."""

    size: int
    levels: bytes
    at: float
    step: int = 0


class RankedChunks:
    """The chunks with their level for every step of age: the lowest level first, in one level the chunk put
    there longest ago. Chunks that reach another age get their level a few at a time, by whatever call
    comes."""

    def __init__(self, ages: Sequence[float]) -> None:
        """Make an empty one. ages: seconds, ascending from 0: where the steps begin."""
        self._ages = ages
        self._chunks: OrderedDict[str, _Chunk] = OrderedDict()  # the one used longest ago first
        self._order, self._due = IndexedHeap(), IndexedHeap()  # by level; by when the next step begins
        self.size = 0

    def __contains__(self, key: str) -> bool:
        return key in self._chunks

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[str]:
        return iter(self._chunks)

    def size_of(self, key: str) -> int | None:
        """Return the chunk's size; None if it is not here."""
        chunk = self._chunks.get(key)
        return None if chunk is None else chunk.size

    def used(self, key: str, size: int, levels: bytes, now: float) -> None:
        """Put the chunk in, or note that it was used at ``now``, which is never less than in calls before.
        levels: one for each step of age."""
        self.size += size - (self.size_of(key) or 0)
        self._chunks[key] = _Chunk(size, levels, now)
        self._chunks.move_to_end(key)
        self._reach(key, 0)
        for _ in range(_AT_ONCE):
            if (first := self._due.peek()) is None or first[1] > now:
                break
            older = self._chunks[first[0]]
            self._reach(first[0], max(older.step + 1, bisect_right(self._ages, now - older.at) - 1))

    def _reach(self, key: str, step: int) -> None:
        chunk = self._chunks[key]
        chunk.step = step
        self._order.push(key, chunk.levels[step])
        if step + 1 < len(self._ages):
            self._due.push(key, chunk.at + self._ages[step + 1])
        else:
            self._due.remove(key)

    def revise(self, key: str, levels: bytes) -> None:
        """Change the levels of a chunk, if it is here, whose age stays."""
        chunk = self._chunks.get(key)
        if chunk is not None and chunk.levels != levels:
            chunk.levels = levels
            self._order.push(key, levels[chunk.step])

    def remove(self, key: str) -> None:
        """Forget the chunk, if it is here."""
        chunk = self._chunks.pop(key, None)
        if chunk is not None:
            self.size -= chunk.size
            self._order.remove(key)
            self._due.remove(key)

    def least(self, wanted: MayLeave = anything) -> str | None:
        """Return the wanted chunk expected to earn its place least; of equals the oldest there."""
        return self._order.first(wanted)

    def oldest(self, wanted: MayLeave = anything) -> str | None:
        """Return the wanted chunk that was not used for the longest time."""
        return next(filter(wanted, self._chunks), None)
