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
import numpy.typing as npt
import torch

from blendrag.attention.latent import LatentRows, paged_latent_attention
from blendrag.attention.paged import PagedRows, paged_attention
from blendrag.attention.runs import find_runs
from blendrag.engine.compat.layer_kv import is_latent, layer_kv
from blendrag.engine.compat.model import (
    attend,
    attention_metadata,
    cache_of,
    key_value_of,
    name_of,
    scale_of,
    scales_of,
    scores_of,
    scratch_cache,
)
from blendrag.engine.forward.blocks import KVBlocks
from blendrag.engine.forward.indices import Ints, upload
from blendrag.engine.forward.page_order import PageOrder

# The addresses that some rows need to attend to their sequence, in any layer. A dict is the backend's
# metadata, by attention layer. Latents have those of each sequence.
Addresses = PagedRows | list[LatentRows] | dict[str, Any]


class PagedCache(KVBlocks):
    """The paged cache of a loaded model. ``runner``: vLLM's model runner."""

    def __init__(self, attentions: Sequence[Any], runner: Any, block_size: int) -> None:
        super().__init__(attentions, block_size)
        self.runner = runner
        self.kv = [layer_kv(attention) for attention in attentions]
        self._orders: dict[torch.Size, PageOrder | None] = {}

    @property
    def by_kernel(self) -> bool:
        """Return whether rows attend by our kernel. Otherwise they attend through the backend, as runs."""
        return self.device.type != "cpu"

    @property
    def rounds(self) -> bool:
        """Return whether what is written is rounded to eight bits."""
        return scales_of(self.attentions[0]) is not None

    @property
    def latent(self) -> bool:
        """Return whether blocks have latents, one head that is K and V (MLA)."""
        return is_latent(self.attentions[0])

    def order(self, layer: int) -> PageOrder | None:
        """Return the order of the numbers in a layer's blocks on a CPU; None elsewhere, of latents, and if it
        cannot be learnt."""
        if self.by_kernel or self.latent:
            return None
        like = cache_of(self.attentions[layer])
        if like.shape not in self._orders:
            scratch = torch.zeros((1, 1, *like.shape[2:]), dtype=like.dtype, device=like.device)
            self._orders[like.shape] = PageOrder.learn(self.kv[layer], scratch)
        return self._orders[like.shape]

    @cached_property
    def readable(self) -> bool:
        """Return whether K and V can be read back (:meth:`Pages.reader`)."""
        if self.rounds or self.latent:
            return not self.rounds
        return all(
            self.order(layer) is not None or key_value_of(each, each.kv_cache) is not None
            for layer, each in enumerate(self.attentions)
        )

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
        return Pages(self, table, scratch=first)


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """The places that some rows go to, in every layer alike: the rows from ``first`` on, to ``slots``, [m]
    int64."""

    slots: torch.Tensor
    first: int = 0


class Pages:
    """The blocks of some sequences, [sequences, blocks]. ``scratch``: how many blocks the cache apart from
    the engine's has that they are in; 0: they are in the engine's.

    Positions are [n], in the sequence (or the sequences, [n]) that a method is given; ascending, where some
    tokens are there already. They and what follows from them are computed on the host.
    """

    def __init__(
        self,
        cache: PagedCache,
        block_ids: Ints,
        written: int = 0,
        scratch: int = 0,
    ) -> None:
        self._cache, self._block_ids, self.written, self._scratch = cache, block_ids, written, scratch
        self._memory: dict[torch.Size, torch.Tensor] = {}  # by the shape of a block
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
            kv, first = self._cache.kv[layer], places.first
            kv.write(key[first:], value[first:], self._of(kv.attention), places.slots)

    def addresses(self, positions: Ints, sequences: Ints | int = 0) -> Addresses:
        """Return addresses for :meth:`attend`, in any layer: rows that see their sequence up to these
        positions."""
        sequences = np.broadcast_to(sequences, positions.shape)
        if self._cache.latent:
            return [self._latents(one, positions, sequences == one) for one in np.unique(sequences)]
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
        if isinstance(addresses, list):
            width = self._cache.kv[layer].value[1]
            return paged_latent_attention(query, memory, addresses, scale_of(attention), width)
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
        size, attentions = self._cache.block_size, self._cache.attentions
        if self._cache.order(0) is None:
            block = upload(self._block_ids[0, positions // size], self.device)
            place = upload(positions % size, self.device)

            def by_views(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
                if self._cache.latent:
                    key = self._of(attentions[layer])[block, place][:, None]
                    return key, key[..., : self._cache.kv[layer].value[1]]
                views = key_value_of(attentions[layer], self._of(attentions[layer]))
                assert views is not None, "asked for where caches are readable"
                return views[0][block, place], views[1][block, place]

            return by_views
        first, end = positions[0] // size, positions[-1] // size + 1
        blocks = upload(self._block_ids[0, first:end], self.device)
        at = upload(positions - first * size, self.device)

        def by_order(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
            pages, order = self._of(attentions[layer])[blocks].flatten(2), self._cache.order(layer)
            assert order is not None, "asked for where caches are readable"
            key, value = (order.read(part, pages).transpose(1, 2).flatten(0, 1) for part in (0, 1))
            return key[at], value[at]

        return by_order

    def _of(self, attention: Any) -> torch.Tensor:
        like = cache_of(attention)
        if not self._scratch:
            return like
        if like.shape[1:] not in self._memory:
            self._memory[like.shape[1:]] = scratch_cache(attention, self._scratch)
        return self._memory[like.shape[1:]]

    def _latents(self, sequence: int, positions: Ints, among: npt.NDArray[np.bool_]) -> LatentRows:
        size, mine = self._cache.block_size, positions[among]
        every = np.arange(mine.max(initial=-1) + 1)
        blocks, places = self._block_ids[sequence, every // size], every % size
        parts = np.flatnonzero(among), mine, blocks, places
        return LatentRows(*(upload(part, self.device) for part in parts))

    def _slots(self, positions: Ints, sequences: Ints | int) -> Ints:
        size = self._cache.block_size
        slots: Ints = self._block_ids[sequences, positions // size] * size + positions % size
        return slots
