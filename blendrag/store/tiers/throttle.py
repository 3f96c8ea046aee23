"""A tier made slower, to see what a slower device would cost."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from blendrag.store.tiers.interface import Read, Tier


def throttle(tier: Tier, bytes_per_s: int) -> Tier:
    """Let ``tier`` read at most ``bytes_per_s``. It is changed, and returned."""
    read = tier.read
    due = time.perf_counter()

    def slowly(wanted: Sequence[Read]) -> list[torch.Tensor]:
        nonlocal due
        due = max(due, time.perf_counter()) + sum(one.into.numel() for one in wanted) / bytes_per_s
        rows = read(wanted)
        time.sleep(max(0.0, due - time.perf_counter()))
        return rows

    tier.read = slowly  # type: ignore[method-assign]
    return tier
