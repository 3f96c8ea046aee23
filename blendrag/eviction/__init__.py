"""The eviction axis: which chunk leaves a full tier. One interface, one registry, one file per policy."""

from blendrag.eviction import gdsf, lfu, lpc, lpc_plus, lru  # noqa: F401  (each registers itself)
from blendrag.eviction.interface import POLICIES, EvictionPolicy, Use, make_policy, register_policy

__all__ = ["POLICIES", "EvictionPolicy", "Use", "make_policy", "register_policy"]
