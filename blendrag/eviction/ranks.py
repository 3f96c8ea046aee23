"""The chunks of a cache in two orders at once: by what a model expects of them, and by age."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from blendrag.eviction.levels import Ages, Levels

_AT_ONCE = 4  # chunks that grow older in one call, at most


class Ranks:
    """Chunks with their level for every step of age. Calls take constant time: chunks that reach another age
    get their level a few at a time, by whatever call comes."""

    def __init__(self, ages: Sequence[float]) -> None:
        """ages: seconds, ascending from 0: where the steps begin."""
        self._ages, self._order = Ages(ages), Levels()
        self._chunks: dict[str, tuple[int, bytes]] = {}
        self.size = 0

    def __contains__(self, key: str) -> bool:
        return key in self._chunks

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[str]:
        return iter(self._chunks)

    def size_of(self, key: str) -> int | None:
        """None if it is not here."""
        chunk = self._chunks.get(key)
        return None if chunk is None else chunk[0]

    def used(self, key: str, size: int, levels: bytes, now: float) -> None:
        """Put the chunk in, or note that it was used. levels: one for each step of age."""
        former = self._chunks.get(key)
        self.size += size - (former[0] if former else 0)
        self._chunks[key] = size, levels
        self._ages.used(key, now)
        self._order.put(key, levels[0])
        for older, step in self._ages.aged(now, _AT_ONCE):
            self._order.put(older, self._chunks[older][1][step])

    def revise(self, key: str, levels: bytes) -> None:
        """Other levels for a chunk, if it is here, whose age stays."""
        chunk = self._chunks.get(key)
        if chunk is not None and chunk[1] != levels:
            self._chunks[key] = chunk[0], levels
            self._order.put(key, levels[self._ages.step(key)])

    def remove(self, key: str) -> None:
        """Forget the chunk, if it is here."""
        chunk = self._chunks.pop(key, None)
        if chunk is not None:
            self.size -= chunk[0]
            self._ages.remove(key)
            self._order.remove(key)

    def least(self) -> str | None:
        """The chunk that is expected to earn its place least; of equals the one that came longest ago."""
        return self._order.first()

    def oldest(self) -> str | None:
        """The chunk that was not used for the longest time."""
        return self._ages.oldest()
