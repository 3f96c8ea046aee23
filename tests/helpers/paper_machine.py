"""Profiles of machines that exist only on paper: their times are known exactly."""

from __future__ import annotations

from typing import Any

from blendrag.control.profile import BlendPoint, PrefillPoint, Profile, TierSpeed
from blendrag.machine import Machine

LAYERS = 30
OVERHEAD_S = 0.01
MACHINE = Machine(
    cpu="paper", cores=2, threads=2, memory=1 << 34, device="cpu", os="Linux", python="3.11", torch="2.13.0",
    vllm="0.32.0", transformers="5.16", blendrag="1", commit="0123456789abcdef", model="/models/paper",
    dtype="bfloat16",
)  # fmt: skip
# About what a two-core machine does with a model of 135 million parameters.
CALL, TOKEN, PAIR = 0.01, 4e-4, 8e-8
SPEEDS = {"ram": 4e9, "disk": 1e9, "redis": 3e8, "object": 1e8}
LATENCY = {"ram": 0.0, "disk": 1e-4, "redis": 1e-3, "object": 1e-2}


def prefill_s(cached: int, new: int) -> float:
    return CALL + TOKEN * new + PAIR * new * (cached + (new + 1) / 2)


def recompute_s(cached: int, fresh: int, ratio: float) -> float:
    tokens, computed = cached + fresh, ratio * cached + fresh
    checked = cached if ratio else 0
    return CALL + TOKEN * (0.03 * tokens + 0.94 * computed + 0.05 * checked) + PAIR * computed * tokens


def make_profile(**changes: Any) -> Profile:
    fields: dict[str, Any] = {
        "identity": "f" * 32,
        "model": "paper",
        "selector": "hkvd",
        "layers": LAYERS,
        "machine": MACHINE,
        "date": "2025-01-01T00:00:00+00:00",
        "prefill": tuple(
            PrefillPoint(cached=cached, new=new, seconds=prefill_s(cached, new))
            for cached in (0, 512, 1536)
            for new in (64, 512, 1536, 3072)
        ),
        "blend": tuple(
            BlendPoint(
                cached=cached,
                fresh=fresh,
                ratio=ratio,
                seconds=recompute_s(cached, fresh, ratio),
                overhead_s=OVERHEAD_S,
            )
            for cached, fresh in ((512, 64), (1536, 64), (3072, 64), (1536, 576))
            for ratio in (0.0, 0.15, 0.5, 1.0)
        ),
        "tiers": {
            name: TierSpeed(bytes_per_s=speed, latency_s=LATENCY[name], calls=LAYERS + 1, measured_at="then")
            for name, speed in SPEEDS.items()
        },
    }
    return Profile(**fields | changes)
