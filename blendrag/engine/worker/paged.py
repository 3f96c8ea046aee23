"""The paged KV cache: where a token's K and V are, how they get there, and attention over them.

Whoever runs a model's layers outside the engine's own forward addresses the cache through here: by position
in a sequence, never by block, slot or layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from blendrag.attention.paged import PagedRows, paged_attention
from blendrag.attention.runs import find_runs
from blendrag.engine import compat

# What some rows need to attend to their sequence, in any layer. A dict: the backend's, by attention layer.
Addresses = PagedRows | dict[str, Any]


class PagedCache:
    """That of a loaded model. A block has the same number in every layer. ``runner``: vLLM's model runner."""

    def __init__(self, attentions: Sequence[Any], runner: Any, block_size: int) -> None:
        self.attentions, self.runner, self.block_size = attentions, runner, block_size

    @property
    def device(self) -> torch.device:
        device: torch.device = self.attentions[0].kv_cache.device
        return device

    @property
    def by_kernel(self) -> bool:
        """Whether rows attend by our kernel, or through the backend, as runs."""
        return self.device.type != "cpu"

    def pages(self, block_ids: Sequence[int], written: int = 0) -> Pages:
        """Those of one request, the first ``written`` tokens of which are there."""
        return Pages(self, torch.tensor([block_ids], device=self.device), written)

    def scratch(self, lengths: Sequence[int]) -> Pages:
        """Room for sequences of these lengths apart from the engine's: for one layer at a time, whichever."""
        table = torch.zeros(len(lengths), -(-max(lengths) // self.block_size), dtype=torch.int64)
        first = 0
        for row, length in enumerate(lengths):
            count = -(-length // self.block_size)
            table[row, :count] = torch.arange(first, first + count)
            first += count
        return Pages(self, table.to(self.device), memory=compat.scratch_cache(self.attentions[0], first))


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where some rows go, in every layer alike. slots: [m] int64, of those that are written. which: their [m]
    indices among the rows; None: all."""

    slots: torch.Tensor
    which: torch.Tensor | None = None


class Pages:
    """Blocks of some sequences, [sequences, blocks] int64. ``memory``: a scratch cache that they are in.

    Positions are [n] int64, in the sequence (the sequences, [n]) that a method is told of.
    """

    def __init__(
        self,
        cache: PagedCache,
        block_ids: torch.Tensor,
        written: int = 0,
        memory: torch.Tensor | None = None,
    ) -> None:
        self._cache, self._block_ids, self._written, self._memory = cache, block_ids, written, memory
        self._table = block_ids.to(torch.int32)

    def places(self, positions: torch.Tensor, sequences: torch.Tensor | int = 0) -> Places:
        """For :meth:`write`, in any layer; what is there already is not written again."""
        slots = self._slots(positions, sequences)
        if not self._written:
            return Places(slots)
        which = torch.nonzero(positions >= self._written, as_tuple=True)[0]
        return Places(slots[which], which)

    def write(self, layer: int, places: Places, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write [n, kv_heads, head_size] K (with RoPE) and V."""
        if places.which is not None:
            key, value = key[places.which], value[places.which]
        if places.slots.numel():
            attention = self._cache.attentions[layer]
            compat.write_kv(attention, key, value, self._of(attention), places.slots)

    def addresses(self, positions: torch.Tensor, sequences: torch.Tensor | int = 0) -> Addresses:
        """For :meth:`attend`, in any layer: rows that see their sequence up to these positions."""
        if isinstance(sequences, int):
            sequences = torch.full_like(positions, sequences)
        if self._cache.by_kernel:
            return PagedRows(positions.to(torch.int32), sequences.to(torch.int32), self._table)
        slots = self._slots(positions, sequences)
        runs = find_runs(positions, sequences)
        return compat.attention_metadata(self._cache.runner, runs, self._table, slots)

    def attend(self, layer: int, query: torch.Tensor, addresses: Addresses) -> torch.Tensor:
        """Attention of [n, heads, head_size] over K and V that are written; same shape."""
        attention = self._cache.attentions[layer]
        memory = self._of(attention)
        if not isinstance(addresses, PagedRows):
            return compat.attend(attention, query, memory, addresses[attention.layer_name])
        scores, key_value = compat.scores_of(attention), compat.key_value_of(attention, memory)
        assert scores is not None and key_value is not None, "such a model is not blended"
        return paged_attention(query, *key_value, addresses, scores)

    def _of(self, attention: Any) -> torch.Tensor:
        return attention.kv_cache if self._memory is None else self._memory

    def _slots(self, positions: torch.Tensor, sequences: torch.Tensor | int) -> torch.Tensor:
        size = self._cache.block_size
        return self._block_ids[sequences, positions // size] * size + positions % size
