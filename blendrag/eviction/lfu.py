"""The policy that evicts the least frequently used chunk."""

from __future__ import annotations

from blendrag.eviction.gdsf import GDSF
from blendrag.eviction.interface import register_policy


@register_policy("lfu")
class LFU(GDSF):
    """The policy by which the chunk that was used least often leaves first; of several, the one used longest
    ago.

    Nothing ages: what was popular once stays. That is LFU's known weakness, and why there is GDSF.
    """

    ages = False
