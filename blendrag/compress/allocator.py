"""The interface of allocators, which decide how many pages of KV each head keeps, and their registry.

A page is one block of one head's tokens; with pages of one token this is the paper's Algorithm 2 as it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch

from blendrag.choice import Reader, number
from blendrag.names import Registry


class Allocator(ABC):
    """The interface of allocators, which share pages out among heads.

    arguments: what a budget may say of it, ``512:ada:alpha=0.2``, and how that is read.
    alpha: the share of every head's pages that is the uniform one (Ada-KV's safeguard, section 3.4).
    """

    arguments: ClassVar[Mapping[str, Reader]] = {"alpha": number(most=1.0)}

    def __init__(self, alpha: float = 0.5) -> None:
        self.alpha = alpha

    @abstractmethod
    def allocate(self, gains: torch.Tensor, pages: int) -> torch.Tensor:
        """Return the pages of each head, [layers, kv_heads] int64, on the CPU. Their mean is exactly
        ``pages``; no head gets more than there are, or less than it has to keep.

        gains: [layers, kv_heads, most] of :func:`~blendrag.compress.pages.page_gains`; those that a head has
        to keep are infinite, ``pages`` at most. pages: ``most`` at most.
        """


ALLOCATORS = Registry[Allocator]("allocator")
register_allocator = ALLOCATORS.register


@register_allocator("uniform")
class Uniform(Allocator):
    """An allocator with the same for every head: SnapKV, and the baseline of Ada-KV's Theorem 4."""

    def allocate(self, gains: torch.Tensor, pages: int) -> torch.Tensor:
        return torch.full(gains.shape[:2], pages, dtype=torch.int64)
