"""The interface of scorers, which tell what a token's KV is worth to a head, and their registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from blendrag.choice import Reader, count
from blendrag.names import Registry


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """One layer, as the last pass over a prompt leaves it. Q and K are with RoPE.

    query: [window, heads, d], of the observation window: the prompt's last tokens.
    key: [n, kv_heads, d], of all its tokens, the window's among them.
    scale: what products of queries and keys are multiplied by.
    value: shaped as the keys. gram: [kv_heads, d, d] float32, W_O^T W_O of the output projection's parts for
    the
        heads that share a KV head, summed. None unless a scorer reads them.
    """

    query: torch.Tensor
    key: torch.Tensor
    scale: float
    value: torch.Tensor | None = None
    gram: torch.Tensor | None = None

    @property
    def candidates(self) -> int:
        """Return the number of tokens before the window, which itself is always kept."""
        return self.key.shape[0] - self.query.shape[0]


class Scorer(ABC):
    """The interface of scorers, which tell what tokens a head keeps first.

    arguments: what a budget may say of it, ``512:window=16``, and how that is read.
    reads_values: whether it needs ``Observed.value`` and ``Observed.gram``.
    window: the prompt's last tokens, which score the others and stay.
    """

    arguments: ClassVar[Mapping[str, Reader]] = {"window": count}
    reads_values: bool = False

    def __init__(self, window: int = 32) -> None:
        self.window = window

    @abstractmethod
    def score(self, layer: Observed) -> torch.Tensor:
        """Return scores, [kv_heads, candidates] float32, none below 0. The highest is kept first, and
        allocators compare heads, and layers, by them."""


SCORERS = Registry[Scorer]("scorer")
register_scorer = SCORERS.register
