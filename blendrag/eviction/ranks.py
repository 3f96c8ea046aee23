"""The chunks of a cache in two orders at once: by what a model expects of them, and by age."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain

from blendrag.eviction.heap import IndexedHeap
from blendrag.eviction.interface import MayLeave, anything

_AT_ONCE = 4  # chunks that move to an older age in one call, at most


class Ages:
    """A calendar of which keys have reached which age, with one page per step.

    borders: seconds, ascending, the first one 0; a key is on page i while its age is in [borders[i],
    borders[i + 1]). Pages are turned by :meth:`aged`, as many keys at a time as the caller wants. Since keys
    come in by time, each page is ordered by age, and so are all pages: the order of LRU falls out.
    """

    def __init__(self, borders: Sequence[float]) -> None:
        self._borders = borders
        self._pages: list[OrderedDict[str, float]] = [OrderedDict() for _ in borders]
        self._page: dict[str, int] = {}
        self._quiet = float("inf")  # no border is crossed before this time

    def used(self, key: str, at: float) -> None:
        """Note that the key's age is 0 at ``at``, which is never less than in calls before."""
        page = self._page.get(key)
        if page:
            del self._pages[page][key]
        first = self._pages[0]
        first[key] = at
        first.move_to_end(key)
        self._page[key] = 0
        if len(self._borders) > 1 and at + self._borders[1] < self._quiet:
            self._quiet = at + self._borders[1]

    def remove(self, key: str) -> None:
        """Forget the key, if it is known."""
        page = self._page.pop(key, None)
        if page is not None:
            del self._pages[page][key]

    def step(self, key: str) -> int:
        """Return the page that the key is on."""
        return self._page[key]

    def oldest(self, wanted: MayLeave = anything) -> str | None:
        """Return the wanted key that was not used for the longest time."""
        return next(filter(wanted, chain.from_iterable(reversed(self._pages))), None)

    def aged(self, now: float, most: int) -> list[tuple[str, int]]:
        """Return up to ``most`` keys that crossed a border since they were last named, with their new pages.

        The oldest come first: a caller that falls behind is late with young keys, which then cross several
        borders at once.
        """
        if now < self._quiet:
            return []
        found: list[tuple[str, int]] = []
        self._quiet = float("inf")
        for page in range(len(self._pages) - 2, -1, -1):
            wait, keys = self._borders[page + 1], self._pages[page]
            while keys:
                key, at = next(iter(keys.items()))
                if at + wait > now or len(found) == most:
                    self._quiet = min(self._quiet, at + wait)
                    break
                del keys[key]
                reached = max(page + 1, bisect_right(self._borders, now - at) - 1)
                self._pages[reached][key] = at
                self._page[key] = reached
                found.append((key, reached))
                if reached + 1 < len(self._borders):
                    self._quiet = min(self._quiet, at + self._borders[reached + 1])
        return found


class RankedChunks:
    """The chunks with their level for every step of age: the lowest level first, in one level the chunk put
    there longest ago. Chunks that reach another age get their level a few at a time, by whatever call
    comes."""

    def __init__(self, ages: Sequence[float]) -> None:
        """Make an empty one. ages: seconds, ascending from 0: where the steps begin."""
        self._ages, self._order = Ages(ages), IndexedHeap()
        self._chunks: dict[str, tuple[int, bytes]] = {}
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
        return None if chunk is None else chunk[0]

    def used(self, key: str, size: int, levels: bytes, now: float) -> None:
        """Put the chunk in, or note that it was used. levels: one for each step of age."""
        former = self._chunks.get(key)
        self.size += size - (former[0] if former else 0)
        self._chunks[key] = size, levels
        self._ages.used(key, now)
        self._order.push(key, levels[0])
        for older, step in self._ages.aged(now, _AT_ONCE):
            self._order.push(older, self._chunks[older][1][step])

    def revise(self, key: str, levels: bytes) -> None:
        """Change the levels of a chunk, if it is here, whose age stays."""
        chunk = self._chunks.get(key)
        if chunk is not None and chunk[1] != levels:
            self._chunks[key] = chunk[0], levels
            self._order.push(key, levels[self._ages.step(key)])

    def remove(self, key: str) -> None:
        """Forget the chunk, if it is here."""
        chunk = self._chunks.pop(key, None)
        if chunk is not None:
            self.size -= chunk[0]
            self._ages.remove(key)
            self._order.remove(key)

    def least(self, wanted: MayLeave = anything) -> str | None:
        """Return the wanted chunk expected to earn its place least; of equals the oldest there."""
        return self._order.first(wanted)

    def oldest(self, wanted: MayLeave = anything) -> str | None:
        """Return the wanted chunk that was not used for the longest time."""
        return self._ages.oldest(wanted)
