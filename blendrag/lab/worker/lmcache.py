"""Blending by LMCache's published semantics, re-implemented for comparison: the selector name ``lmcache``.

K is compared at layer 1, the mask is bottom-right aligned and leaks, and everything behind the first chunk
that is missing is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from blendrag.control.guard import LoadGuard
from blendrag.engine.blend.blending import Chunk, RequestBlend
from blendrag.engine.blend.blends import Blends
from blendrag.engine.forward.indices import Ints
from blendrag.engine.forward.prompt_forward import PromptForward
from blendrag.engine.wire.recipe import BlendOrder
from blendrag.options import BlendOptions
from blendrag.select import Selector
from blendrag.store.tiers import Tier

LMCACHE = "lmcache"


class LabBlends(Blends):
    """Blends as LMCache does them where a recipe asks for it."""

    def blend_of(self, order: BlendOrder) -> type[RequestBlend]:
        return LMCacheBlend if order.recipe.options.selector == LMCACHE else RequestBlend


class NoGuard(LoadGuard):
    """A guard that refuses nothing: what loading takes is what is measured."""

    def refuses(self, loads: Mapping[Tier, int], tokens: int) -> str | None:
        return None


class LMCacheBlend(RequestBlend):
    """One request's blend, as LMCache does it."""

    @property
    def forward_type(self) -> type[PromptForward]:
        return LMCacheForward

    def _found(self) -> list[Chunk]:
        chunks = super()._found()
        missing = [start for key, start, _ in self._order.recipe.spans if key in self._missing]
        kept = [chunk for chunk in chunks if chunk[0].start < min(missing, default=math.inf)]
        self._close_all_but(kept, chunks)
        return kept

    def _selector_of(self, options: BlendOptions) -> Selector:
        if options.selector == LMCACHE:
            options = replace(options, selector="hkvd:metric=k:check_layers=1")
        return super()._selector_of(options)


class LMCacheForward(PromptForward):
    """A forward with the mask of the released CacheBlend and LMCache."""

    def _end(self, at: int, count: int, *_: Any, **__: Any) -> int:
        """Take whole layers only: the mask counts the selected tokens."""
        return count

    def _seen(self, positions: Ints) -> Ints:
        cached = self.tokens.cached
        if not cached.size or positions.size == cached.size + self.tokens.fresh.size:
            return positions
        return bottom_right(positions, np.isin(positions, cached), int(cached[-1]) + 1)


def bottom_right(positions: Ints, selected: npt.NDArray[np.bool_], end: int) -> Ints:
    """Return the mask of the released CacheBlend and LMCache, for comparison with them and for nothing else:
    the selected tokens count as the last ones before ``end``, where the stored tokens end.

    positions: [m], ascending. selected: [m], of the stored tokens; the others are masked exactly,
    since those systems do not blend them. Returns [m], up to which position each sees. It leaks: the i-th of
    k selected tokens sees end - k + i + 1 keys, which for a scattered one is more than its position allows.
    """
    count = int(selected.sum())
    seen = positions.copy()
    seen[selected] = np.arange(end - count, end)
    return seen
