"""The blocks of a paged KV cache as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from blendrag.engine.compat.model import block_format, cache_of
from blendrag.engine.compat.states import HybridLayers


class KVBlocks:
    """The blocks of these attention layers' caches. A block has the same number in every layer, and its bytes
    do not depend on that. ``states``: of a hybrid model, the layers that these are of."""

    def __init__(
        self, attentions: Sequence[Any], block_size: int, states: HybridLayers | None = None
    ) -> None:
        self.attentions, self.block_size, self.states = attentions, block_size, states
        self._parts = cache_of(attentions[0]).shape[0] // states.blocks if states else 1

    @property
    def device(self) -> torch.device:
        return cache_of(self.attentions[0]).device

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a block in one layer."""
        return self._parts * cache_of(self.attentions[0])[0].nbytes

    @property
    def format(self) -> str:
        """Return a name for the format of a block's bytes, so that no other engine takes them for its own.
        Empty where layers differ in it."""
        sizes = {cache_of(attention)[0].nbytes for attention in self.attentions}
        if len(sizes) > 1:
            return ""
        states = f"; states {self.states.format}" if self.states else ""
        return block_format(self.attentions) + states

    def read_blocks(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Return the bytes of these blocks as they are, on the CPU: uint8 [layers, blocks * block_bytes]."""
        at = self._at(block_ids)
        rows = torch.empty(len(self.attentions), len(block_ids) * self.block_bytes, dtype=torch.uint8)
        for row, attention in zip(rows, self.attentions, strict=True):
            row.copy_(cache_of(attention)[at].contiguous().view(torch.uint8).view(-1))
        return rows

    def write_blocks(self, block_ids: Sequence[int], rows: torch.Tensor) -> None:
        """Write what :meth:`read_blocks` gave into these blocks, whatever their numbers were."""
        at = self._at(block_ids)
        for row, attention in zip(rows, self.attentions, strict=True):
            cache = cache_of(attention)
            cache[at] = row.view(cache.dtype).view(len(at), *cache.shape[1:]).to(self.device)

    def _at(self, block_ids: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor(block_ids, device=self.device)
        # A hybrid model's blocks may be several of its attention backend's.
        return (self._parts * ids[:, None] + torch.arange(self._parts, device=self.device)).flatten()
