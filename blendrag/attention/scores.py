"""The operations of attention on the products of queries and keys, apart from the causal mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """The scores of one layer. A score is a product times ``scale``.

    window: how many keys a query sees, its own the last of them; None: all up to its own.
    soft_cap: scores are bent to stay below it, by ``soft_cap * tanh(score / soft_cap)``; 0: they are not.
    sinks: [heads], a further score of each head, which takes its share of the softmax and has no value.
    """

    scale: float
    window: int | None = None
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None

    @property
    def bare(self) -> bool:
        """Return whether the softmax is over the scores that are in sight, and nothing else."""
        return not self.soft_cap and self.sinks is None

    def in_sight(self, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return [m, n] bool: which of ``keys`` [n] a query at each of ``positions`` [m] sees."""
        behind = positions[:, None] - keys[None, :]
        return (behind >= 0) if self.window is None else (behind >= 0) & (behind < self.window)
