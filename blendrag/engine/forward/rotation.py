"""The inverse of a model's RoPE, learnt from the module that applies it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from blendrag.engine.forward.indices import upload


@dataclass(frozen=True, slots=True, eq=False)
class Unrotation:
    """The inverse of RoPE, whichever numbers of a head it turns, and by which factor it scales them.

    RoPE turns pairs of numbers: R = c + s J, where J swaps the two of a pair and changes a sign. Its
    transpose, which turns back, is c - s J = 2 c - R, so that one more rotation is all that it takes.
    """

    rotate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    partners: torch.Tensor  # [head_size], of each number
    squares: torch.Tensor  # [head_size], of the factor that RoPE scales by

    @classmethod
    def of(
        cls,
        rotate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Self:
        """Learn it from ``rotate(positions, [n, size])``, of one matrix."""
        one_hot = upload(np.eye(size, dtype=np.float32), device).to(dtype)
        itself = upload(np.arange(size), device)
        turned = rotate(torch.ones_like(itself), one_hot.clone()).float()
        partners = (turned.abs() + one_hot.float() * -2).argmax(1)
        alone = turned.gather(1, partners[:, None])[:, 0] == 0
        return cls(rotate, torch.where(alone, itself, partners), turned.square().sum(1).to(dtype))

    def at(self, positions: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what takes K at ``positions``, [n], back to K before RoPE, [n, kv_heads, head_size], and may
        overwrite it. The cosines come from a row of ones at each position, whose pairs become (c - s, c + s).
        """
        ones = self.rotate(positions, self.squares.new_ones(len(positions), len(self.squares)))
        cosines = ones + ones[:, self.partners]  # twice

        def back(key: torch.Tensor) -> torch.Tensor:
            twice = cosines[:, None] * key
            return (twice - self.rotate(positions, key.flatten(1)).view(key.shape)) / self.squares

        return back
