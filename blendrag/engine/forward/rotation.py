"""The inverse of a model's RoPE, learnt from the module that applies it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Unrotation:
    """The inverse of RoPE at some positions, whichever numbers of a head it turns, and by which factor it
    scales them.

    RoPE turns pairs of numbers: R = c + s J, where J swaps the two of a pair and changes a sign. Its
    transpose, which turns back, is c - s J = 2 c - R, so that one more rotation is all that it takes.
    """

    rotate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    positions: torch.Tensor
    cosines: torch.Tensor  # [n, head_size]
    squares: torch.Tensor  # [head_size], of the factor that RoPE scales by

    @classmethod
    def of(
        cls,
        rotate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        positions: torch.Tensor,
        size: int,
        dtype: torch.dtype,
    ) -> Self:
        """Learn it from ``rotate(positions, [n, size])``: the pairs from one matrix, the cosines from a row
        of ones at each position, whose pairs become (c - s, c + s)."""
        one_hot = torch.eye(size, dtype=dtype, device=positions.device)
        turned = rotate(positions.new_full((size,), 1), one_hot.clone()).float()
        partner = (turned.abs() + one_hot.float() * -2).argmax(1)
        partner = torch.where(
            turned.gather(1, partner[:, None])[:, 0] == 0, torch.arange(size).to(partner), partner
        )
        ones = rotate(positions, torch.ones(len(positions), size, dtype=dtype, device=positions.device))
        return cls(rotate, positions, (ones + ones[:, partner]) / 2, turned.square().sum(1).to(dtype))

    def __call__(self, key: torch.Tensor) -> torch.Tensor:
        """Return K before RoPE of ``key``, [n, kv_heads, head_size]."""
        turned = self.rotate(self.positions, key.flatten(1).clone()).view(key.shape)
        return (2 * self.cosines[:, None] * key - turned) / self.squares
