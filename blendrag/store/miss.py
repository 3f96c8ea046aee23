"""The absence of a chunk's KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Reason = Literal["missing", "damaged", "mismatch", "unavailable"]


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a chunk's KV could not be had: never stored or evicted; damaged; made of other tokens; on a tier
    that cannot be reached now."""

    reason: Reason
