"""Where records are kept: one interface, one file per kind of tier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from blendrag.store.record import Layout
from blendrag.store.tiers.disk import DiskTier, Found
from blendrag.store.tiers.interface import Opened, Read, Tier, TierError
from blendrag.store.tiers.ram import RamTier
from blendrag.store.tiers.spec import TierSpec

__all__ = ["DiskTier", "Opened", "RamTier", "Read", "Tier", "TierError", "TierSpec", "make_tier"]


def make_tier(
    spec: TierSpec,
    layout: Layout,
    folder: Path,
    found: Found | None = None,
    on_evict: Callable[[str], None] | None = None,
) -> Tier:
    """The tier that ``spec`` describes. folder: where a disk tier without a path of its own keeps its files;
    ``found`` and ``on_evict`` are for that one (see DiskTier).

    Raises ConfigError (a url that cannot be used), StoreError. A server is not asked yet.
    """
    if spec.kind == "ram":
        return RamTier(spec, layout)
    if spec.kind == "disk":
        if spec.path is None:
            return DiskTier(spec, layout, folder, found, on_evict)
        return DiskTier(spec, layout, spec.path.expanduser() / layout.digest)
    if spec.kind == "redis":
        from blendrag.store.tiers.redis import RedisTier

        return RedisTier(spec, layout)
    from blendrag.store.tiers.object import ObjectTier

    return ObjectTier(spec, layout)
