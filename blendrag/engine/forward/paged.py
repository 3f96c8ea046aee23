"""The paged KV cache: where a token's K and V are, how they get there, and attention over them.

Code that runs a model's layers outside the engine's own forward addresses the cache through this module: by
position in a sequence, never by block, slot or layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from blendrag.attention.paged import PagedRows, paged_attention
from blendrag.attention.runs import find_runs
from blendrag.engine.compat.model import (
    attend,
    attention_metadata,
    block_format,
    cache_of,
    key_value_of,
    name_of,
    scales_of,
    scores_of,
    scratch_cache,
    write_kv,
)
from blendrag.engine.forward.indices import Ints, upload
from blendrag.engine.forward.page_order import PageOrder

# The addresses that some rows need to attend to their sequence, in any layer. A dict is the backend's
# metadata, by attention layer.
Addresses = PagedRows | dict[str, Any]


class PagedCache:
    """The paged cache of a loaded model. A block has the same number in every layer. ``runner``: vLLM's model
    runner."""

    def __init__(self, attentions: Sequence[Any], runner: Any, block_size: int) -> None:
        self.attentions, self.runner, self.block_size = attentions, runner, block_size

    @property
    def device(self) -> torch.device:
        return cache_of(self.attentions[0]).device

    @property
    def by_kernel(self) -> bool:
        """Return whether rows attend by our kernel. Otherwise they attend through the backend, as runs."""
        return self.device.type != "cpu"

    @property
    def rounds(self) -> bool:
        """Return whether what is written is rounded to eight bits."""
        return scales_of(self.attentions[0]) is not None

    @cached_property
    def order(self) -> PageOrder | None:
        """The order of a block's numbers on a CPU; None elsewhere, and if it cannot be learnt."""
        if self.by_kernel:
            return None
        like = self.attentions[0].kv_cache
        scratch = torch.zeros((1, 1, *like.shape[2:]), dtype=like.dtype, device=like.device)
        return PageOrder.learn(self.attentions[0], scratch)

    @property
    def readable(self) -> bool:
        """Return whether K and V can be read back (:meth:`Pages.reader`)."""
        first = self.attentions[0]
        if self.rounds:
            return False
        return self.order is not None or key_value_of(first, first.kv_cache) is not None

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a block in one layer."""
        block = cache_of(self.attentions[0])[0]
        return int(block.numel() * block.element_size())

    @property
    def format(self) -> str:
        """Return a name for the format of a block's bytes, so that no other engine takes them for its own."""
        return block_format(self.attentions)

    def read_blocks(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Return the bytes of these blocks as they are, on the CPU: uint8 [layers, blocks * block_bytes]."""
        at = torch.tensor(block_ids, device=self.device)
        rows = torch.empty(len(self.attentions), len(block_ids) * self.block_bytes, dtype=torch.uint8)
        for row, attention in zip(rows, self.attentions, strict=True):
            row.copy_(cache_of(attention)[at].contiguous().view(torch.uint8).view(-1))
        return rows

    def write_blocks(self, block_ids: Sequence[int], rows: torch.Tensor) -> None:
        """Write what :meth:`read_blocks` gave into these blocks, whatever their numbers were."""
        at = torch.tensor(block_ids, device=self.device)
        for row, attention in zip(rows, self.attentions, strict=True):
            cache = cache_of(attention)
            cache[at] = row.view(cache.dtype).view(len(block_ids), *cache.shape[1:]).to(self.device)

    def pages(self, block_ids: Sequence[int], written: int = 0) -> Pages:
        """Return the pages of one request, the first ``written`` tokens of which are there."""
        return Pages(self, np.array([block_ids]), written)

    def scratch(self, lengths: Sequence[int]) -> Pages:
        """Return room for sequences of these lengths apart from the engine's: for one layer at a time, any of
        them."""
        table = np.zeros((len(lengths), -(-max(lengths) // self.block_size)), np.int64)
        first = 0
        for row, length in enumerate(lengths):
            count = -(-length // self.block_size)
            table[row, :count] = range(first, first + count)
            first += count
        return Pages(self, table, memory=scratch_cache(self.attentions[0], first))


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """The places that some rows go to, in every layer alike: the rows from ``first`` on, to ``slots``, [m]
    int64."""

    slots: torch.Tensor
    first: int = 0


class Pages:
    """The blocks of some sequences, [sequences, blocks]. ``memory``: the scratch cache that they are in, if
    any.

    Positions are [n], in the sequence (or the sequences, [n]) that a method is given; ascending, where some
    tokens are there already. They and what follows from them are computed on the host.
    """

    def __init__(
        self,
        cache: PagedCache,
        block_ids: Ints,
        written: int = 0,
        memory: torch.Tensor | None = None,
    ) -> None:
        self._cache, self._block_ids, self.written, self._memory = cache, block_ids, written, memory
        self._table = upload(block_ids.astype(np.int32), cache.device)

    @property
    def device(self) -> torch.device:
        return self._cache.device

    def places(self, positions: Ints, sequences: Ints | int = 0) -> Places:
        """Return places for :meth:`write`, in any layer. What is there already is not written again."""
        first = int(np.searchsorted(positions, self.written)) if self.written else 0
        return Places(upload(self._slots(positions, sequences)[first:], self.device), first)

    def write(self, layer: int, places: Places, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write [n, kv_heads, head_size] K (with RoPE) and V."""
        if places.slots.numel():
            attention, first = self._cache.attentions[layer], places.first
            write_kv(attention, key[first:], value[first:], self._of(attention), places.slots)

    def addresses(self, positions: Ints, sequences: Ints | int = 0) -> Addresses:
        """Return addresses for :meth:`attend`, in any layer: rows that see their sequence up to these
        positions."""
        sequences = np.broadcast_to(sequences, positions.shape)
        if self._cache.by_kernel:
            # Separate tensors: the kernel is compiled again for memory with another alignment.
            at, of = (upload(each.astype(np.int32), self.device) for each in (positions, sequences))
            return PagedRows(at, of, self._table)
        slots = torch.from_numpy(self._slots(positions, sequences))
        return attention_metadata(self._cache.runner, find_runs(positions, sequences), self._table, slots)

    def attend(self, layer: int, query: torch.Tensor, addresses: Addresses) -> torch.Tensor:
        """Return the attention of ``query``, [n, heads, head_size], over K and V that are written; same
        shape."""
        attention = self._cache.attentions[layer]
        memory = self._of(attention)
        if not isinstance(addresses, PagedRows):
            return attend(attention, query, memory, addresses[name_of(attention)])
        scores, key_value = scores_of(attention), key_value_of(attention, memory)
        assert scores is not None and key_value is not None, "such a model is not blended"
        scales = scales_of(attention)
        if scales is None:
            return paged_attention(query, *key_value, addresses, scores)
        scores = replace(scores, scale=scores.scale * scales[0])
        return paged_attention(query, *key_value, addresses, scores) * scales[1]

    @property
    def readable(self) -> bool:
        """Return whether what is written can be read back."""
        return self._cache.readable

    def reader(self, positions: Ints) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
        """Return what reads, by layer, K (with RoPE) and V that are written at these positions, [n, kv_heads,
        head_size] each."""
        size, attentions, order = self._cache.block_size, self._cache.attentions, self._cache.order
        if order is None:
            block = upload(self._block_ids[0, positions // size], self.device)
            place = upload(positions % size, self.device)

            def by_views(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
                views = key_value_of(attentions[layer], self._of(attentions[layer]))
                assert views is not None, "asked for where caches are readable"
                return views[0][block, place], views[1][block, place]

            return by_views
        first, end = positions[0] // size, positions[-1] // size + 1
        blocks = upload(self._block_ids[0, first:end], self.device)
        at = upload(positions - first * size, self.device)

        def by_order(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
            pages = self._of(attentions[layer])[blocks].flatten(2)
            key, value = (order.read(part, pages).transpose(1, 2).flatten(0, 1) for part in (0, 1))
            return key[at], value[at]

        return by_order

    def _of(self, attention: Any) -> torch.Tensor:
        return cache_of(attention) if self._memory is None else self._memory

    def _slots(self, positions: Ints, sequences: Ints | int) -> Ints:
        size = self._cache.block_size
        slots: Ints = self._block_ids[sequences, positions // size] * size + positions % size
        return slots
