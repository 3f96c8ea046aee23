"""The order in which a backend keeps the numbers of a block, learnt from the backend itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from blendrag.engine.compat.layer_kv import LayerKV

_BITS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True, eq=False)
class PageOrder:
    """The place of each number of K and of V in a page, which is one block of one head.

    at: [2, block_size, head_size] int64 on the host.
    """

    at: torch.Tensor

    @classmethod
    def learn(cls, kv: LayerKV, scratch: torch.Tensor) -> Self | None:
        """Have the backend write numbers that are all different into ``scratch``, [1, 1, block_size, 2 *
        head_size]. None if it does not keep them as they are, or its order is no strided view."""
        block, width = scratch.shape[2:]
        bits = _BITS.get(scratch.element_size())
        if bits is None or block * width > 1 << 16:
            return None
        numbers = torch.arange(block * width, device=scratch.device).to(bits)
        key, value = numbers.view(scratch.dtype).view(2, block, 1, width // 2)
        kv.write(key, value, scratch, torch.arange(block, device=scratch.device))
        kept = scratch.flatten().view(bits).cpu().int() & 0xFFFF
        ordered = kept.sort()
        order = cls(ordered.indices.view(2, block, width // 2))
        here = torch.arange(block * width)
        lines = all(order.read(part, here).equal(order.at[part]) for part in (0, 1))
        return order if lines and ordered.values.equal(here.int()) else None

    def read(self, part: int, pages: torch.Tensor) -> torch.Tensor:
        """Return K (part 0) or V (1) of pages, [..., 2 * block_size * head_size], as [..., block_size,
        head_size]. Each digit of the two indices has one step, so this is a strided view, which is copied a
        few times faster than single numbers."""
        order = self.at[part]
        sizes, steps, first = [], [], int(order[0, 0])
        for entries in (order[:, 0], order[0]):
            for digit, at in _digits(len(entries)):
                sizes.append(digit)
                steps.append(int(entries[at]) - first)
        lead = pages.shape[:-1]
        start = pages.storage_offset() + first
        lines = pages.as_strided((*lead, *sizes), (*pages.stride()[:-1], *steps), start)
        return lines.reshape(*lead, *order.shape)


def _digits(count: int) -> list[tuple[int, int]]:
    """Return count and worth of each digit of numbers below ``count``, in base 2 except the highest."""
    low = (count & -count).bit_length() - 1  # how often it can be divided by two
    twos = [(2, 1 << bit) for bit in reversed(range(low))]
    return [(count >> low, 1 << low), *twos] if count >> low > 1 else twos
