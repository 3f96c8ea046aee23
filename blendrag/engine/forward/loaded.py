"""A model that is loaded in a worker."""

from __future__ import annotations

from dataclasses import dataclass

from blendrag.engine.forward.decoder import Decoder
from blendrag.engine.forward.paged import PagedCache
from blendrag.engine.forward.ranks import ALONE, Ranks


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The loaded model that all requests are blended with. ranks: the ranks that have the rest of it."""

    decoder: Decoder
    cache: PagedCache
    ranks: Ranks = ALONE
