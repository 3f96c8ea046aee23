"""The interface of selectors, which choose the cached tokens to recompute."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from blendrag.choice import Reader, yes_or_no
from blendrag.names import Registry

Metric = Literal["v", "k", "kv"]


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """The cached tokens a selector chooses from: all of them at its first check layer, survivors later. All
    tensors but ``attention``, which is where it was computed, are on the CPU.

    offsets: [n] int64, place of each token inside its chunk.
    lengths: [n] int64, length of the chunk each token belongs to.
    total: cached tokens of the whole request; ratios refer to it.
    deviation: [n] float32, squared L2 distance between fresh and stored K/V at the check layer;
        None at layer 0, before anything was computed, and where nobody reads it.
    norm: mean squared L2 norm of the fresh K/V there, the unit of thresholds.
    attention: [n] float32, softmax mass that the question's tokens put on each cached token over reused KV,
        summed over heads, question tokens and the upper half of the layers; None unless the selector reads
        the question.
    """

    offsets: torch.Tensor
    lengths: torch.Tensor
    total: int
    deviation: torch.Tensor | None = None
    norm: float = 1.0
    attention: torch.Tensor | None = None


class Selector(ABC):
    """The interface of selectors, which choose the cached tokens that stay in the computation.

    A selector is asked once at each of its check layers, in ascending order; a token dropped once is never
    asked about again. A selector whose only check layer is 0 decides before anything is computed: the
    cheapest kind, since no layer runs over all tokens. It is made for one request.

    arguments: what its name may be followed by, ``hkvd:metric=k``, and how that is read; they are keyword
        arguments of its constructor.
    reads_question: whether it needs ``CachedTokens.attention``. That costs a first pass of the question's
        tokens over reused KV.
    reads_deviation: by which metric it needs ``CachedTokens.deviation``, at check layers above 0, if any.
        Not together with reads_question.
    shifts: whether the tokens that are not recomputed move by what those near them have moved.
    only_cap: whether it may choose fewer tokens than the ratio says.
    """

    arguments: ClassVar[Mapping[str, Reader]] = {"auto_ratio": yes_or_no}
    reads_question: bool = False
    reads_deviation: Metric | None = "v"
    only_cap: bool = False
    shifts: bool = False

    def __init__(self, ratio: float, auto_ratio: bool = False) -> None:
        """Set the shares. ratio: the share of the cached tokens. auto_ratio: whether more are recomputed
        where loading leaves time for it (mode A of the controller)."""
        self.ratio, self.auto_ratio = ratio, auto_ratio

    @abstractmethod
    def check_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the ascending layers below ``num_layers`` at which :meth:`select` is asked. Called first."""

    @abstractmethod
    def select(self, layer: int, tokens: CachedTokens) -> torch.Tensor:
        """Return ascending int64 indices into ``tokens`` of those that are recomputed from this layer on."""


class RankedSelector(Selector):
    """The base of selectors that can tell which of any two tokens is the better one to recompute."""

    def share(self, layer: int) -> float:
        """Return the share of the request's cached tokens that is kept from check layer ``layer`` on."""
        return self.ratio

    @abstractmethod
    def rank(self, tokens: CachedTokens) -> torch.Tensor:
        """Return [n] float scores, the highest recomputed first; minus infinity: not worth it."""

    def select(self, layer: int, tokens: CachedTokens) -> torch.Tensor:
        scores = self.rank(tokens)
        order = torch.sort(scores, descending=True, stable=True).indices
        top = order[: budget(tokens.total, self.share(layer))]
        top, worth = torch.stack([top.double(), scores[top].double()]).cpu()  # together: each would be a wait
        return torch.sort(top[worth > float("-inf")].long()).values


SELECTORS = Registry[Selector]("selector")
register_selector = SELECTORS.register


def budget(total: int, ratio: float) -> int:
    """Return the tokens that ``ratio`` of ``total`` stands for; at least one if the ratio is above 0."""
    return min(total, max(1, round(total * ratio))) if total and ratio > 0 else 0
