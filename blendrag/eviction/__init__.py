"""The eviction policies, which choose the chunk that leaves a full tier: one interface, one registry, one
file per policy."""

from blendrag.eviction import gdsf, lfu, lpc, lpc_plus, lru  # noqa: F401  (each registers itself)
from blendrag.eviction.interface import POLICIES, EvictionPolicy, Use, make_policy, register_policy

__all__ = ["POLICIES", "EvictionPolicy", "Use", "make_policy", "register_policy"]
