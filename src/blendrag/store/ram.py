"""The RAM tier: chunks as tensors."""

from __future__ import annotations

from collections.abc import Callable

from blendrag.store.chunk import Chunk
from blendrag.store.tier import Tier


class RamTier(Tier):
    """Holds chunks in memory. With a limit of 0 it holds nothing."""

    name = "ram"

    def __init__(
        self, limit: int | None, policy: str = "lru", on_evict: Callable[[str], None] | None = None
    ) -> None:
        super().__init__(limit, policy, on_evict)
        self._chunks: dict[str, Chunk] = {}

    def fits(self, chunk: Chunk) -> bool:
        return self.limit is None or self._size(chunk) <= self.limit

    def _size(self, chunk: Chunk) -> int:
        return chunk.nbytes

    def _read(self, key: str) -> Chunk | None:
        return self._chunks.get(key)

    def _write(self, chunk: Chunk) -> None:
        self._chunks[chunk.key] = chunk

    def _remove(self, key: str) -> None:
        self._chunks.pop(key, None)
