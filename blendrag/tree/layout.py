"""The record of a node: the engine's whole KV blocks, layer by layer, as opaque bytes.

A block's bytes do not depend on its number, so they can go back into other blocks as they came. A node's
first block may begin with tokens of its parent, and its last one end with tokens that came behind it: those
are overwritten before anything attends to them.

A hybrid model keeps a state beside KV, which is that behind one token. It is a record of its own: a node
without tokens, behind the one at whose end it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from blendrag.store.identity import NO_CONTEXT, KVIdentity
from blendrag.store.record import DamagedError, DraftLayers, Head, Layout, Record, TokenIds, checksum
from blendrag.tree.path import place, placed, state_key


class NodeBlocks(NamedTuple):
    """The sizes of an engine's blocks: tokens in each, its bytes in a layer, and the bytes of a state of all
    layers; 0: there are no states."""

    tokens: int
    nbytes: int
    state: int = 0


class NodeLayout(Layout):
    """The layout of nodes' records: ``token_ids`` are all of the prompt's up to the node's end, and rows are
    its blocks in each layer, or equal parts of a state. Of several ranks, each has a shard, whatever heads
    it has."""

    def __init__(
        self, identity: KVIdentity, dtype: str, sizes: NodeBlocks, rank: int = 0, ranks: int = 1
    ) -> None:
        super().__init__(identity, dtype, range(rank, rank + 1), ranks)
        self.heads = ranks
        self._sizes = sizes

    def blocks(self, start: int, end: int) -> range:
        """Return which blocks of a prompt hold its tokens [start, end)."""
        return range(start // self._sizes.tokens, -(-end // self._sizes.tokens))

    def key_of(self, ids: Sequence[int] | TokenIds, context: str) -> str:
        start, _ = placed(context)
        return state_key(self.identity, ids) if start == len(ids) else super().key_of(ids, context)

    def _shards(self, rows: int, drafts: DraftLayers) -> int:
        return 0 if drafts.layers else super()._shards(rows, drafts)

    def row_bytes(self, tokens: int, shards: int = 1, context: str = NO_CONTEXT) -> int:
        if shards != self.shards:
            raise DamagedError(f"a node's record: {shards:,} shards")
        try:
            start, _ = placed(context)
        except ValueError as error:
            raise DamagedError(f"a node's record: {error}") from None
        if start > tokens - (not self._sizes.state):
            raise DamagedError(f"a node's record: it begins at {start} of {tokens} tokens")
        if start == tokens:
            return -(-self._sizes.state // self.num_layers)
        return len(self.blocks(start, tokens)) * self._sizes.nbytes

    def state_rows(self, state: torch.Tensor) -> torch.Tensor:
        """Return a state's bytes as the rows of its record, with zeros behind them."""
        row = -(-len(state) // self.num_layers)
        return pad(state, (0, row * self.num_layers - len(state))).view(self.num_layers, row)

    def node(self, key: str, token_ids: Sequence[int], start: int, parent: str, rows: torch.Tensor) -> Record:
        """Make a record of uint8 [shards * layers, bytes of the node's blocks]. token_ids: all up to the
        node's end."""
        ids = np.ascontiguousarray(token_ids, dtype="<i4")
        context = place(start, parent)
        assert rows.shape[1] == self.row_bytes(len(ids), self.shards, context), "other blocks than the node's"
        return Record(Head(self, key, ids, tuple(checksum(row) for row in rows), context), rows)
