"""The eviction policies, which choose the chunk that leaves a full tier: a file for each kind."""

from blendrag.eviction import gdsf, lpc, lpc_plus, lru  # noqa: F401  (each registers itself)
from blendrag.eviction.interface import POLICIES, EvictionPolicy, Use, make_policy, register_policy

__all__ = ["POLICIES", "EvictionPolicy", "Use", "make_policy", "register_policy"]
