"""The paged KV cache as pages. A page is one block of one head of one layer, whichever request has the block.

vLLM keeps all layers' KV in one allocation, so that a page is a strided view of it in any layout. The tokens
that a head keeps can stand in any page; a backend's own kernels read and write pages as blocks of one KV
head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, Self

import numpy as np
import torch

from blendrag.engine.compat.layer_kv import KV, layer_kv
from blendrag.engine.compat.model import cache_of
from blendrag.engine.forward.indices import Ints, upload
from blendrag.engine.forward.page_order import PageOrder


class HeadPages:
    """The pages of the layers with these attention modules, whose caches, [blocks, kv_heads, block_size, 2 *
    head_size] each, are in one allocation.

    view: [pages, 1, block_size, 2 * head_size], pages of one KV head. Where the layout keeps the heads of a
    token next to each other, pages overlap.
    """

    def __init__(self, attentions: Sequence[Any], caches: Sequence[torch.Tensor]) -> None:
        first = min(cache.storage_offset() for cache in caches)
        self._layers = np.array([cache.storage_offset() - first for cache in caches])
        self.attentions = attentions
        self.num_layers, like = len(caches), caches[0]
        blocks, self.kv_heads, self.block_size, width = like.shape
        self._block, self._head = like.stride()[:2]
        self._unit = gcd(self._block, self._head, *self._layers.tolist())
        last = self._layers.max() + (blocks - 1) * self._block + (self.kv_heads - 1) * self._head
        shape = (int(last) // self._unit + 1, 1, self.block_size, width)
        self.view = like.as_strided(shape, (self._unit, width, *like.stride()[2:]), first)

    @classmethod
    def of(cls, attentions: Sequence[Any]) -> Self | None:
        """Return the pages; None where the caches have other shapes, or are not in one allocation."""
        caches = [cache_of(attention) for attention in attentions]
        (heads, size), like = layer_kv(attentions[0]).key, caches[0]
        shape = (heads, like.shape[-2], 2 * size)
        facts = {(c.untyped_storage().data_ptr(), c.shape, c.stride(), c.dtype) for c in caches}
        plain = like.dim() == 4 and tuple(like.shape[1:]) == shape and like.is_floating_point()
        return cls(attentions, caches) if plain and len(facts) == 1 else None

    @property
    def device(self) -> torch.device:
        return self.view.device

    def ids(self, layers: Ints | int, blocks: Ints, heads: Ints | int) -> Ints:
        """Return the id of the page of each layer, block and head, which are broadcast; int64."""
        return (self._layers[layers] + blocks * self._block + heads * self._head) // self._unit

    def write(self, layer: int, pages: Ints, key: torch.Tensor, value: torch.Tensor) -> None:
        """Fill whole pages with K and V of one head, [pages * block_size, head_size] each."""
        slots = (pages[:, None] * self.block_size + np.arange(self.block_size)).ravel()
        # The kernels take K and V by rows of heads.
        rows = key.unsqueeze(1).contiguous(), value.unsqueeze(1).contiguous()
        layer_kv(self.attentions[layer]).write(*rows, self.view, upload(slots, self.device))

    def copy_of(self, blocks: Ints) -> list[torch.Tensor]:
        """Return what each layer has in these blocks, for :meth:`restore`."""
        return [cache_of(attention)[upload(blocks, self.device)] for attention in self.attentions]

    def restore(self, blocks: Ints, copies: Sequence[torch.Tensor]) -> None:
        """Put back what :meth:`copy_of` has copied from these blocks."""
        for attention, copy in zip(self.attentions, copies, strict=True):
            cache_of(attention)[upload(blocks, self.device)] = copy


class PageReader:
    """A reader of K and V in pages, in whichever order the backend keeps a page's numbers."""

    def __init__(self, pages: HeadPages, order: PageOrder) -> None:
        self._pages, self._view, self._order = pages, pages.view, order
        steps, width = pages.view.stride(), pages.view.shape[3]
        self._keys_at, self._values_at = (
            (part // width * steps[2] + part % width * steps[3]).to(pages.device) for part in order.at
        )
        last = sum((size - 1) * step for size, step in zip(pages.view.shape, steps, strict=True))
        self._memory = pages.view.as_strided((last + 1,), (1,), pages.view.storage_offset())

    @classmethod
    def of(cls, pages: HeadPages, scratch: torch.Tensor) -> Self | None:
        """Return a reader, or None if the backend's order cannot be learnt (``PageOrder.learn``)."""
        order = PageOrder.learn(layer_kv(pages.attentions[0]), scratch)
        return None if order is None else cls(pages, order)

    def whole(self, part: int, ids: Ints) -> torch.Tensor:
        """Return K (part 0) or V (1) of these pages, one after the other: [pages * block_size, head_size]."""
        pages = self._view[upload(ids, self._view.device)].flatten(1)
        return self._order.read(part, pages).flatten(0, -2)

    def rows(self, ids: Ints, tokens: torch.Tensor) -> KV:
        """Return K and V, [n, head_size] each, of the tokens with these n numbers in these pages."""
        block = self._pages.block_size
        pages = upload(ids, tokens.device)[tokens // block] * self._view.stride(0)
        at, pages = tokens % block, pages[:, None]
        return self._memory[self._keys_at[at] + pages], self._memory[self._values_at[at] + pages]


@dataclass(frozen=True, slots=True, eq=False)
class KeptPages:
    """The pages that hold what a request's heads have kept, all of them full.

    blocks: the request's blocks, whose pages these all are. counts: [layers, kv_heads]. table: [layers,
    kv_heads, most] int64 page ids, the first ``counts`` of each line.
    """

    blocks: Ints
    counts: Ints
    table: Ints

    @classmethod
    def of(cls, pages: HeadPages, blocks: Sequence[int] | Ints, counts: Ints) -> Self:
        """Assign the pages of ``blocks`` to heads, layer by layer. If each head has as many pages as there
        are blocks, each keeps its own."""
        kept = np.asarray(blocks, np.int64)
        layers, heads = np.arange(pages.num_layers)[:, None, None], np.arange(pages.kv_heads)[:, None]
        free = pages.ids(layers, kept, heads).ravel()
        assert free.size == counts.sum(), "the budgets are of all pages"
        ends = counts.cumsum().reshape(counts.shape)
        table = np.zeros((*counts.shape, int(counts.max())), np.int64)
        at = np.arange(table.shape[2])
        mine = at < counts[..., None]
        table[mine] = free[((ends - counts)[..., None] + at)[mine]]
        return cls(kept, counts, table)
