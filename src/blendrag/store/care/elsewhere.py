"""The tiers of an index that are not in its folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from blendrag.store.catalogue import Catalogue
from blendrag.store.record import Layout
from blendrag.store.tiers import Tier, TierError, TierSpec, make_tier


@contextlib.contextmanager
def other_tiers(catalogue: Catalogue, stack: Sequence[TierSpec]) -> Iterator[list[Tier]]:
    """Folders and servers of the stack, opened; none if no engine has written to the index yet.

    Raises ConfigError for a tier that cannot be used as it is described.
    """
    own = {("disk", None), ("ram", None)}
    elsewhere = [spec for spec in stack if (spec.kind, spec.path) not in own]
    tiers: list[Tier] = []
    try:
        if elsewhere and catalogue.dtype is not None:
            layout = Layout(catalogue.identity, catalogue.dtype)
            for spec in elsewhere:
                tiers.append(make_tier(spec, layout, Path()))
        yield tiers
    finally:
        for tier in tiers:
            with contextlib.suppress(TierError):
                tier.close()
