"""The tiers where records are kept: one interface, one registry, one file per kind of tier."""

from blendrag.store.stack import TierSpec
from blendrag.store.tiers import object, redis  # noqa: F401  (each registers itself)
from blendrag.store.tiers.disk import DiskTier
from blendrag.store.tiers.interface import (
    TIERS,
    Context,
    GoneError,
    Opened,
    Read,
    Tier,
    TierError,
    make_tier,
)
from blendrag.store.tiers.ram import RamTier

__all__ = [
    "TIERS",
    "Context",
    "DiskTier",
    "GoneError",
    "Opened",
    "RamTier",
    "Read",
    "Tier",
    "TierError",
    "TierSpec",
    "make_tier",
]
