"""The paged KV cache: where a token's K and V are, how they get there, and attention over them.

Code that runs a model's layers outside the engine's own forward addresses the cache through this module: by
position in a sequence, never by block, slot or layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from blendrag.attention.latent import LatentRows, paged_latent_attention
from blendrag.attention.paged import PagedRows, paged_attention
from blendrag.attention.runs import find_runs
from blendrag.attention.scattered import Room, ScatteredRows, scattered_attention, takes, why_not
from blendrag.engine.compat.drafts import attentions_of_drafts
from blendrag.engine.compat.groups import NULL_BLOCK, LayerGroup, common_block_size
from blendrag.engine.compat.layer_kv import KV, is_latent, layer_kv
from blendrag.engine.compat.model import (
    attend,
    attention_metadata,
    cache_of,
    isa_of,
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

# The addresses that some rows need to attend to their sequence, in the layers of a group. A dict is the
# backend's metadata, by attention layer. Latents have those of each sequence.
GroupAddresses = PagedRows | tuple[ScatteredRows, dict[str, Any]] | list[LatentRows] | dict[str, Any]
Addresses = Sequence[GroupAddresses]


class PagedCache(KVBlocks):
    """The paged cache of a loaded model. ``runner``: vLLM's model runner. ``groups``: of its layers."""

    def __init__(self, attentions: Sequence[Any], runner: Any, groups: Sequence[LayerGroup]) -> None:
        super().__init__(attentions, common_block_size(groups))
        self.runner, self.groups = runner, groups
        self.kv = [layer_kv(attention) for attention in attentions]
        self.group = [self._group_of(attention) for attention in attentions]
        self._orders: dict[torch.Size, PageOrder | None] = {}

    def _group_of(self, attention: Any) -> int:
        if len(self.groups) == 1:
            return 0
        name = name_of(attention)
        return next(number for number, group in enumerate(self.groups) if name in group.layers)

    @cached_property
    def with_drafts(self) -> KVBlocks:
        """Return the same blocks with the layers of a model that drafts, if its KV is in them, too."""
        (names, *more) = [group.layers for group in self.groups]
        others = [] if more else attentions_of_drafts(self.runner, names)
        alike = (one for one in others if cache_of(one)[0].nbytes == self.block_bytes)
        every = {id(one): one for one in (*self.attentions, *alike)}
        return KVBlocks([*every.values()], self.block_size)

    @property
    def by_kernel(self) -> bool:
        """Return whether all rows attend by our kernel for GPUs. On a CPU some attend through the backend."""
        return self.device.type != "cpu"

    @property
    def rounds(self) -> bool:
        """Return whether what is written is rounded to eight bits."""
        return scales_of(self.attentions[0]) is not None

    @property
    def latent(self) -> bool:
        """Return whether blocks have latents, one head that is K and V (MLA)."""
        return is_latent(self.attentions[0])

    def given_up(self, block_ids: Sequence[int], others: Sequence[Sequence[int]] = ()) -> tuple[int, ...]:
        """Return the layers of which a request has only its last blocks, since the others are behind a
        window. Takes what :meth:`pages` does."""
        behind = self._behind((block_ids, *others))
        return tuple(layer for layer, group in enumerate(self.group) if behind[group])

    def _behind(self, block_ids: Sequence[Sequence[int]]) -> list[int]:
        """Return how many of a request's first tokens have no blocks, in each group."""
        pairs = zip(block_ids, self.groups, strict=True)
        return [group.block_size * _leading_nulls(ids) if group.window else 0 for ids, group in pairs]

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
    def orders_for_kernel(self) -> list[torch.Tensor | None]:
        """Return the order of a CPU's pages, by group, where scattered rows attend by our kernel; None where
        they attend as any others, as where the backend has tiles of AMX, which are faster than its others."""
        orders: list[torch.Tensor | None] = []
        for group in range(len(self.groups)):
            layers = [layer for layer, of in enumerate(self.group) if of == group]
            found = {self.order_for_kernel(layer) for layer in layers}
            order = found.pop() if len(found) == 1 else None
            orders.append(order.at.int() if order is not None and why_not() is None else None)
        return orders

    @property
    def has_kernel(self) -> bool:
        """Return whether scattered rows attend by a kernel of ours, in some layers at least."""
        return self.by_kernel or any(order is not None for order in self.orders_for_kernel)

    def order_for_kernel(self, layer: int) -> PageOrder | None:
        """Return the order of a layer's pages, if our kernel for CPUs computes such layers."""
        attention = self.attentions[layer]
        known = isa_of(attention) == "vec" and not self.latent and not self.rounds
        fits = known and takes(self.kv[layer].key[1], cache_of(attention).dtype, scores_of(attention))
        return self.order(layer) if fits else None

    @cached_property
    def readable(self) -> bool:
        """Return whether K and V can be read back (:meth:`Pages.reader`)."""
        if self.rounds or self.latent:
            return not self.rounds
        return all(
            self.order(layer) is not None or key_value_of(each, each.kv_cache) is not None
            for layer, each in enumerate(self.attentions)
        )

    def pages(
        self,
        block_ids: Sequence[int],
        written: int = 0,
        others: Sequence[Sequence[int]] = (),
        length: int = 0,
    ) -> Pages:
        """Return the pages of one request, the first ``written`` tokens of which are there.

        block_ids, others: its blocks in the first group of layers, and in each other one. length: tokens that
        are written; asked for only where blocks are behind windows.
        """
        held, behind = (block_ids, *others), self._behind((block_ids, *others))
        tables = [
            _Table(self.device, np.array([ids]), group.block_size, max(written, gone))
            for ids, group, gone in zip(held, self.groups, behind, strict=True)
        ]
        if not any(behind):
            return Pages(self, tables)
        # All of the prompt's rows attend, also those of whose window the engine has no blocks.
        apart = self._apart([length])
        attended = [at if gone else own for own, at, gone in zip(tables, apart, behind, strict=True)]
        return Pages(self, attended, tables)

    def scratch(self, lengths: Sequence[int]) -> Pages:
        """Return room apart from the engine's for sequences of these lengths, for any one layer at a time."""
        return Pages(self, self._apart(lengths))

    def _apart(self, lengths: Sequence[int]) -> list[_Table]:
        """Return the blocks of such sequences in each group; groups with blocks of one size share them."""
        by_size = {group.block_size: self._scratch(lengths, group.block_size) for group in self.groups}
        return [by_size[group.block_size] for group in self.groups]

    def _scratch(self, lengths: Sequence[int], size: int) -> _Table:
        counts = np.array([-(-length // size) for length in lengths])
        table = np.zeros((len(lengths), counts.max()), np.int64)
        table[np.arange(table.shape[1]) < counts[:, None]] = np.arange(counts.sum())
        return _Table(self.device, table, size, scratch=int(counts.sum()))


def _leading_nulls(block_ids: Sequence[int]) -> int:
    return next((at for at, block in enumerate(block_ids) if block != NULL_BLOCK), len(block_ids))


class _Table:
    """The blocks of some sequences, [sequences, blocks], in layers whose blocks have ``size`` tokens.

    written: how many of the first tokens are not to be written. scratch: how many blocks the memory apart
    from the engine's has that they are in; 0: they are in the engine's.
    """

    def __init__(
        self, device: torch.device, block_ids: Ints, size: int, written: int = 0, scratch: int = 0
    ) -> None:
        self.block_ids, self.size, self._written, self._scratch = block_ids, size, written, scratch
        self._memory: dict[torch.Size, torch.Tensor] = {}  # by the shape of a block
        self.on_device = upload(block_ids.astype(np.int32), device)

    def places(self, positions: Ints, sequences: Ints | int) -> _Slots:
        first = int(np.searchsorted(positions, self._written)) if self._written else 0
        return _Slots(self, upload(self.slots(positions, sequences)[first:], self.on_device.device), first)

    def slots(self, positions: Ints, sequences: Ints | int) -> Ints:
        return self.block_ids[sequences, positions // self.size] * self.size + positions % self.size

    def memory_of(self, attention: Any) -> torch.Tensor:
        like = cache_of(attention)
        if not self._scratch:
            return like
        if like.shape[1:] not in self._memory:
            self._memory[like.shape[1:]] = scratch_cache(attention, self._scratch)
        return self._memory[like.shape[1:]]


class _Slots(NamedTuple):
    """The places of the rows from ``first`` on: ``slots``, [m] int64."""

    table: _Table
    slots: torch.Tensor
    first: int


Places = Sequence[Sequence[_Slots]]
"""The places that some rows go to, in every layer alike, by its group."""


class Pages:
    """The blocks of some sequences, in each group of layers: those that rows attend to, and those that are
    ``kept``, if they are others: K and V go into both.

    Positions are [n], in the sequence (or the sequences, [n]) that a method is given; ascending, where some
    tokens are there already. They and what follows from them are computed on the host.
    """

    def __init__(self, cache: PagedCache, attended: Sequence[_Table], kept: Sequence[_Table] = ()) -> None:
        self._cache, self._attended, self._room = cache, attended, Room()
        pairs = zip(attended, kept or attended, strict=True)
        self._written = [(one,) if one is other else (one, other) for one, other in pairs]

    @property
    def device(self) -> torch.device:
        return self._cache.device

    def whole_blocks(self, length: int) -> int:
        """Return how many of the first ``length`` tokens are in blocks that are full."""
        return length // self._cache.block_size * self._cache.block_size

    def places(self, positions: Ints, sequences: Ints | int = 0) -> Places:
        """Return places for :meth:`write`, in any layer. What is there already is not written again."""
        known: dict[_Table, _Slots] = {}
        for table in chain.from_iterable(self._written):
            if table not in known:
                known[table] = table.places(positions, sequences)
        return [[known[table] for table in tables] for tables in self._written]

    def write(self, layer: int, places: Places, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write [n, kv_heads, head_size] K (with RoPE) and V."""
        kv = self._cache.kv[layer]
        for table, slots, first in places[self._cache.group[layer]]:
            if slots.numel():
                kv.write(key[first:], value[first:], table.memory_of(kv.attention), slots)

    def addresses(self, positions: Ints, sequences: Ints | int = 0, scattered: int = 0) -> Addresses:
        """Return addresses for :meth:`attend`, in any layer: rows that see their sequence up to these
        positions. scattered: how many of the first rows, of one sequence, may attend by a kernel of ours on a
        CPU, too; the others attend there as the engine's own do, to the last bit."""
        sequences = np.broadcast_to(sequences, positions.shape)
        if self._cache.latent:
            (table,) = self._attended
            return [[self._latents(table, one, positions, sequences == one) for one in np.unique(sequences)]]
        if self._cache.by_kernel:
            # Separate tensors: the kernel is compiled again for memory with another alignment.
            at, of = (upload(each.astype(np.int32), self.device) for each in (positions, sequences))
            return [PagedRows(at, of, table.on_device) for table in self._attended]
        groups = range(len(self._attended))
        return [self._on_cpu(group, positions, sequences, scattered) for group in groups]

    def _on_cpu(self, group: int, positions: Ints, sequences: Ints, scattered: int) -> GroupAddresses:
        table, order = self._attended[group], self._cache.orders_for_kernel[group] if scattered else None
        first = 0 if order is None else scattered
        left, of, rest = positions[first:], sequences[first:], {}
        if left.size:
            slots = torch.from_numpy(table.slots(left, of))
            rest = attention_metadata(self._cache.runner, group, find_runs(left, of), table.on_device, slots)
        if order is None:
            return rest
        return ScatteredRows(torch.from_numpy(positions[:first]), table.on_device[0], order, self._room), rest

    def attend(self, layer: int, query: torch.Tensor, addresses: Addresses) -> torch.Tensor:
        """Return the attention of ``query``, [n, heads, head_size], over what is written; same shape."""
        attention, at = self._cache.attentions[layer], addresses[self._cache.group[layer]]
        memory = self._of(layer)
        if isinstance(at, list):
            width = self._cache.kv[layer].value[1]
            return paged_latent_attention(query, memory, at, scale_of(attention), width)
        if isinstance(at, dict):
            return attend(attention, query, memory, at[name_of(attention)])
        scores = scores_of(attention)
        assert scores is not None, "such a model is not blended"
        if isinstance(at, tuple):
            rows, rest = at
            if not rest:
                return scattered_attention(query, memory, rows, scores)
            by_kernel, others = query.tensor_split([len(rows.positions)])
            found = scattered_attention(by_kernel, memory, rows, scores)
            return torch.cat([found, attend(attention, others, memory, rest[name_of(attention)])])
        key_value = key_value_of(attention, memory)
        assert key_value is not None, "such a model is not blended"
        scales = scales_of(attention)
        if scales is None:
            return paged_attention(query, *key_value, at, scores)
        scores = replace(scores, scale=scores.scale * scales[0])
        return paged_attention(query, *key_value, at, scores) * scales[1]

    @property
    def readable(self) -> bool:
        """Return whether what is written can be read back."""
        return self._cache.readable

    def reader(self, positions: Ints) -> Callable[[int], KV]:
        """Return what reads, by layer, K (with RoPE) and V that are written at these positions, [n, kv_heads,
        head_size] each."""
        readers: dict[int, Callable[[int], KV]] = {}

        def read(layer: int) -> KV:
            group = self._cache.group[layer]
            if group not in readers:
                by_views = self._cache.order(layer) is None
                make = self._reader_by_views if by_views else self._reader_by_order
                readers[group] = make(self._attended[group], positions)
            return readers[group](layer)

        return read

    def _reader_by_views(self, table: _Table, positions: Ints) -> Callable[[int], KV]:
        block = upload(table.block_ids[0, positions // table.size], self.device)
        place = upload(positions % table.size, self.device)

        def by_views(layer: int) -> KV:
            if self._cache.latent:
                key = self._of(layer)[block, place][:, None]
                return key, key[..., : self._cache.kv[layer].value[1]]
            views = key_value_of(self._cache.attentions[layer], self._of(layer))
            assert views is not None, "asked for where caches are readable"
            return views[0][block, place], views[1][block, place]

        return by_views

    def _reader_by_order(self, table: _Table, positions: Ints) -> Callable[[int], KV]:
        first, end = positions[0] // table.size, positions[-1] // table.size + 1
        blocks = upload(table.block_ids[0, first:end], self.device)
        at = upload(positions - first * table.size, self.device)

        def by_order(layer: int) -> KV:
            pages, order = self._of(layer)[blocks].flatten(2), self._cache.order(layer)
            assert order is not None, "asked for where caches are readable"
            key, value = (order.read(part, pages).transpose(1, 2).flatten(0, 1) for part in (0, 1))
            return key[at], value[at]

        return by_order

    def _of(self, layer: int) -> torch.Tensor:
        """Return the memory that rows attend to in a layer."""
        return self._attended[self._cache.group[layer]].memory_of(self._cache.attentions[layer])

    def _latents(
        self, table: _Table, sequence: int, positions: Ints, among: npt.NDArray[np.bool_]
    ) -> LatentRows:
        mine = positions[among]
        every = np.arange(mine.max(initial=-1) + 1)
        blocks, places = table.block_ids[sequence, every // table.size], every % table.size
        parts = np.flatnonzero(among), mine, blocks, places
        return LatentRows(*(upload(part, self.device) for part in parts))
