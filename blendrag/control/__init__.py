"""The loading controller (CacheBlend, section 5.1): how long loading and computing would take, and which to
do."""

from blendrag.control.choose import ChunkCost, Controller, Decision, cheapest_tier, ratio_for
from blendrag.control.estimate import Estimator
from blendrag.control.profile import Profile, load_profile

__all__ = [
    "ChunkCost",
    "Controller",
    "Decision",
    "Estimator",
    "Profile",
    "cheapest_tier",
    "load_profile",
    "ratio_for",
]
