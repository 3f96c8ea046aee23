"""Where records are kept: one interface, one file per kind of tier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from blendrag.store.record import Layout
from blendrag.store.spec import TierSpec
from blendrag.store.tiers.disk import DiskTier, Found
from blendrag.store.tiers.interface import GoneError, Opened, Read, Tier, TierError
from blendrag.store.tiers.ram import RamTier
from blendrag.store.tiers.throttle import throttle

__all__ = ["DiskTier", "GoneError", "Opened", "RamTier", "Read", "Tier", "TierError", "TierSpec", "make_tier"]


def make_tier(
    spec: TierSpec,
    layout: Layout,
    folder: Path,
    found: Found | None = None,
    on_evict: Callable[[str], None] | None = None,
) -> Tier:
    """The tier that ``spec`` describes. folder: where a disk tier without a path of its own keeps its files,
    of which ``found`` knows (see DiskTier). on_evict: for a local tier (see LocalTier).

    Raises ConfigError (a url that cannot be used), StoreError. A server is not asked yet.
    """
    tier = _make(spec, layout, folder, found, on_evict)
    return throttle(tier, spec.throttle) if spec.throttle else tier


def _make(
    spec: TierSpec,
    layout: Layout,
    folder: Path,
    found: Found | None,
    on_evict: Callable[[str], None] | None,
) -> Tier:
    if spec.kind == "ram":
        return RamTier(spec, layout, on_evict)
    if spec.kind == "disk":
        if spec.path is None:
            return DiskTier(spec, layout, folder, found, on_evict)
        return DiskTier(spec, layout, spec.path.expanduser() / layout.digest, None, on_evict)
    if spec.kind == "redis":
        from blendrag.store.tiers.redis import RedisTier

        return RedisTier(spec, layout)
    from blendrag.store.tiers.object import ObjectTier

    return ObjectTier(spec, layout)
