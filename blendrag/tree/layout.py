"""The record of a node: the engine's whole KV blocks, layer by layer, as opaque bytes.

A block's bytes do not depend on its number, so they can go back into other blocks as they came. A node's
first block may begin with tokens of its parent, and its last one end with tokens that came behind it: those
are overwritten before anything attends to them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from blendrag.store.identity import NO_CONTEXT, KVIdentity
from blendrag.store.record import DamagedError, Head, Layout, Record, checksum
from blendrag.tree.path import place, placed


class NodeLayout(Layout):
    """The layout of nodes' records: ``token_ids`` are all of the prompt's up to the node's end, and rows are
    blocks of ``block_size`` tokens and ``block_bytes`` bytes in a layer."""

    def __init__(self, identity: KVIdentity, dtype: str, block_size: int, block_bytes: int) -> None:
        super().__init__(identity, dtype)
        self._block_size, self._block_bytes = block_size, block_bytes

    def blocks(self, start: int, end: int) -> range:
        """Return which blocks of a prompt hold its tokens [start, end)."""
        return range(start // self._block_size, -(-end // self._block_size))

    def row_bytes(self, tokens: int, rows: int, context: str = NO_CONTEXT) -> int:
        if rows != self.num_layers:
            raise DamagedError(f"a node's record: {rows:,} rows")
        try:
            start, _ = placed(context)
        except ValueError as error:
            raise DamagedError(f"a node's record: {error}") from None
        if start >= tokens:
            raise DamagedError(f"a node's record: it begins at {start} of {tokens} tokens")
        return len(self.blocks(start, tokens)) * self._block_bytes

    def node(self, key: str, token_ids: Sequence[int], start: int, parent: str, rows: torch.Tensor) -> Record:
        """Make a record of uint8 [layers, bytes of the node's blocks]. token_ids: all up to the node's
        end."""
        ids = np.ascontiguousarray(token_ids, dtype="<i4")
        context = place(start, parent)
        assert rows.shape == (self.num_layers, self.row_bytes(len(ids), len(rows), context)), (
            "other blocks than the node's"
        )
        return Record(Head(self, key, ids, tuple(checksum(row) for row in rows), context), rows)
