"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(
    holds: Callable[[], object],
    within_s: float = 60.0,
    said: object = "waited in vain",
    every_s: float = 0.01,
) -> None:
    """Return as soon as ``holds()`` is true. AssertionError with what is ``said`` if that takes too long."""
    ends = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < ends, said
        time.sleep(every_s)
