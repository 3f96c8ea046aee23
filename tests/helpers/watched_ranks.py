"""A worker that tells which tokens its selectors have chosen, and fails where it is told to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blendrag.engine.blend.blending import Choices
from blendrag.engine.blend.fused_prefill import FusedPrefill
from blendrag.engine.forward.indices import Ints
from blendrag.engine.wire.recipe import BlendOrder
from blendrag.engine.worker.data_plane import DataPlane
from blendrag.engine.worker.extension import BlendWorker
from blendrag.select.interface import CachedTokens

_chosen: list[list[int]] = []
_failing: list[int] = []
_selected, _keep = FusedPrefill._selected, Choices.keep


def selected(self: FusedPrefill, layer: int, candidates: CachedTokens) -> Ints:
    if self._ranks.rank in _failing:
        raise MemoryError("told to fail")
    chosen = _selected(self, layer, candidates)
    _chosen.append(chosen.tolist())
    return chosen


def keep(self: Choices, order: BlendOrder, chosen: Ints) -> None:
    """Selectors that read the question choose before the fused prefill begins."""
    _chosen.append(chosen.tolist())
    _keep(self, order, chosen)


FusedPrefill._selected = selected  # type: ignore[method-assign]
Choices.keep = keep  # type: ignore[method-assign]


def take_chosen() -> list[list[int]]:
    """By choice, since the last call."""
    taken = list(_chosen)
    _chosen.clear()
    return taken


def fail(rank: int) -> None:
    """From now on, at this rank's next choice."""
    _failing.append(rank)


class WatchedPlane(DataPlane):
    def operations(self) -> dict[str, Callable[..., Any]]:
        return super().operations() | {"take_chosen": take_chosen, "fail": fail}


class WatchedRank(BlendWorker):
    blendrag_data_plane = WatchedPlane
