"""The attention of requests whose heads have kept different tokens: each request of a step becomes one
sequence for each KV head.

A head's sequence is the pages that it has kept, all of them full, then its own page of every later block,
which the engine goes on writing as always. K keeps its position, and softmax needs no order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from blendrag.engine.budget.head_pages import HeadPages, KeptPages
from blendrag.engine.compat.head_attention import HeadKernel, HeadSequences
from blendrag.engine.compat.model import name_of
from blendrag.engine.forward.indices import Ints, upload

_TILE = 128  # tokens: kernels read tables in tiles of this size, past the end of a sequence

# The pages of one request's sequences, [layers, kv_heads, pages] int32, and by how many tokens each is
# shorter than the request.
_RequestTable = tuple[npt.NDArray[np.int32], Ints | int]


@dataclass(slots=True, eq=False)
class _Kept:
    """A request whose KV was evicted, and the pages that stand in for its blocks before ``first_later``."""

    request_id: str
    pages: KeptPages
    first_later: int


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """The sequences of a step, in each layer. tokens: of the step. rows: [rows], the place of each sequence's
    query among heads of tokens; None if they are in order."""

    metadata: Any
    layers: list[HeadSequences]
    tokens: int
    rows: torch.Tensor | None


class HeadReading:
    """The attention by heads of a model's layers, which ask in each step (:class:`HeadAttention`)."""

    def __init__(self, attentions: Sequence[Any], pages: HeadPages, kernel: HeadKernel) -> None:
        self._number = {name_of(attention): number for number, attention in enumerate(attentions)}
        self._pages, self._kernel = pages, kernel
        self._kept: dict[int, _Kept] = {}  # by the request's first block, which is its own
        self._step: _Step | None = None
        self._plain: Any = None  # metadata of the last step in which nothing was evicted
        # The tables of the last step, by request and blocks.
        self._lines: dict[tuple[_Kept | None, bytes], _RequestTable] = {}

    def keep(self, request_id: str, pages: KeptPages, first_later: int) -> None:
        """Have this request read these pages for its blocks before ``first_later``, from the next step on."""
        self._kept[int(pages.blocks[0])] = _Kept(request_id, pages, first_later)
        self._plain = None

    def forget(self, request_ids: Collection[str]) -> None:
        """Forget requests that have ended or lost their blocks: the blocks may be other requests' now."""
        if self._kept and request_ids:
            gone = [block for block, kept in self._kept.items() if kept.request_id in request_ids]
            for block in gone:
                del self._kept[block]
        if not self._kept:
            self._step, self._plain, self._lines = None, None, {}

    def attend(self, layer: Any, query: torch.Tensor, metadata: Any, output: torch.Tensor) -> bool:
        """Compute a layer's attention, if a row of the step has evicted KV; else only return False."""
        if not self._kept or metadata is self._plain:
            return False
        if self._step is None or self._step.metadata is not metadata:
            self._step = self._sequences(metadata)
            if self._step is None:
                self._plain = metadata
                return False
        step, sequences = self._step, self._step.layers[self._number[name_of(layer)]]
        tokens, size = step.tokens, query.shape[-1]
        by_heads = query[:tokens].reshape(tokens * self._pages.kv_heads, -1, size)
        rows = by_heads if step.rows is None else by_heads[step.rows]
        found = self._kernel.attend(layer, rows, self._pages.view, sequences)
        if step.rows is not None:
            by_heads = torch.empty_like(found)
            by_heads[step.rows] = found
            found = by_heads
        output[:tokens] = found.view(output[:tokens].shape)
        return True

    def _sequences(self, metadata: Any) -> _Step | None:
        starts = metadata.query_start_loc.cpu().numpy().astype(np.int64)
        count = len(starts) - 1
        blocks = metadata.block_table[:count].cpu().numpy().astype(np.int64)
        kept = [self._kept.get(block) for block in blocks[:, 0].tolist()]
        if not any(kept):
            return None
        seq_lens = metadata.seq_lens[:count].cpu().numpy().astype(np.int64)
        heads, size = self._pages.kv_heads, self._pages.block_size
        keys = [
            (one, blocks[row, : -(-length // size)].tobytes())
            for row, (one, length) in enumerate(zip(kept, seq_lens.tolist(), strict=True))
        ]
        self._lines = {key: self._lines.get(key) or self._lines_of(*key) for key in keys}
        lines = [self._lines[key] for key in keys]
        tile = lcm(_TILE, size) // size
        width = -(-max(table.shape[2] for table, _ in lines) // tile) * tile
        tables = np.zeros((self._pages.num_layers, count, heads, width), np.int32)
        lengths = np.zeros(tables.shape[:3], np.int32)
        for row, (table, dropped) in enumerate(lines):
            tables[:, row, :, : table.shape[2]] = table
            lengths[:, row] = seq_lens[row] - dropped
        queries = np.diff(starts)
        rows = None
        if (queries != 1).any():
            at = [np.arange(a, b) * heads + h for a, b in pairwise(starts) for h in range(heads)]
            rows = upload(np.concatenate(at), self._pages.device)
        device, sequences = self._pages.device, count * heads
        ends = np.concatenate([[0], np.repeat(queries, heads).cumsum()]).astype(np.int32)
        most = lengths.max((1, 2)).tolist()
        there = upload(ends, device), torch.from_numpy(ends), int(queries.max())
        of_layers = zip(
            upload(tables.reshape(-1, sequences, width), device),
            upload(lengths.reshape(-1, sequences), device),
            most,
            strict=True,
        )
        layers = [HeadSequences(*layer, *there) for layer in of_layers]
        return _Step(metadata, layers, int(starts[-1]), rows)

    def _lines_of(self, kept: _Kept | None, block_ids: bytes) -> _RequestTable:
        pages, blocks = self._pages, np.frombuffer(block_ids, np.int64)
        later = blocks if kept is None else blocks[kept.first_later :]
        layers, heads = np.arange(pages.num_layers)[:, None, None], np.arange(pages.kv_heads)[:, None]
        own = pages.ids(layers, later, heads)
        if kept is None:
            return own.astype(np.int32), 0
        counts, table = kept.pages.counts, kept.pages.table
        joined = np.zeros((*counts.shape, table.shape[2] + len(later)), np.int32)
        joined[:, :, : table.shape[2]] = table
        at = counts[..., None] + np.arange(len(later))
        np.put_along_axis(joined, at, own, axis=2)
        return joined, (kept.first_later - counts) * pages.block_size
