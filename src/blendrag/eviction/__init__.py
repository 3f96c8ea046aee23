"""The eviction axis: which chunk leaves a full tier. One interface, one registry."""

from blendrag.eviction.interface import POLICIES, EvictionPolicy, make_policy, register_policy

__all__ = ["POLICIES", "EvictionPolicy", "make_policy", "register_policy"]
