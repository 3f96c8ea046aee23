"""From samples to the numbers that are shown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from blendrag.lab.arms import TOP, Sample

PARTS = ("load", "select", "recompute")
_LEAST = 1e-12  # probability; keeps the logarithm finite


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile (linear between samples)."""
    low, middle, high = np.percentile(values, (10, 50, 90))
    return {"median": float(middle), "p10": float(low), "p90": float(high)}


def first_token_kl(reference: Mapping[int, float], other: Mapping[int, float], top: int = TOP) -> float:
    """KL(reference, other) in nats over the reference's ``top`` tokens, all others as one bucket.

    Arguments are {token: log probability} of each side's most likely tokens. A token ``other`` does not
    list shares, evenly with the bucket, what its listed tokens leave over; it never gets more than the
    least likely of them.
    """
    tokens = sorted(reference, key=lambda token: -reference[token])[:top]
    listed = {token: math.exp(logprob) for token, logprob in other.items()}
    unlisted = sum(token not in listed for token in tokens)
    left_over = max(0.0, 1.0 - sum(listed.values()))
    guess = min(min(listed.values()), left_over / (unlisted + 1))
    p = [math.exp(reference[token]) for token in tokens]
    q = [listed.get(token, guess) for token in tokens]
    p, q = (np.maximum([*side, 1.0 - sum(side)], _LEAST).tolist() for side in (p, q))
    p, q = ([x / sum(side) for x in side] for side in (p, q))
    return max(0.0, sum(x * math.log(x / y) for x, y in zip(p, q, strict=True)))


def summarise(samples: Mapping[str, Sequence[Sample]]) -> dict[str, dict[str, Any]]:
    """The numbers of each arm. ``samples``: per arm one per repeat, with ``full`` among the arms.

    ttft_ms, speedup_vs_full (repeat by repeat): median, p10, p90.
    kl_first_token (nats), top1_agreement: means, against ``full``.
    tokens_recomputed, split_ms: medians; the split's ``engine`` is the rest of the median TTFT.
    """
    full = samples["full"]
    return {name: _summary(own, full) for name, own in samples.items()}


def _summary(own: Sequence[Sample], full: Sequence[Sample]) -> dict[str, Any]:
    pairs = list(zip(own, full, strict=True))
    ttft = spread([sample.ttft_ms for sample in own])
    split = {part: float(np.median([sample.split_ms.get(part, 0.0) for sample in own])) for part in PARTS}
    return {
        "ttft_ms": ttft,
        "speedup_vs_full": spread([reference.ttft_ms / sample.ttft_ms for sample, reference in pairs]),
        "kl_first_token": float(
            np.mean([first_token_kl(reference.logprobs, sample.logprobs) for sample, reference in pairs])
        ),
        "top1_agreement": float(np.mean([sample.token == reference.token for sample, reference in pairs])),
        "tokens_recomputed": round(float(np.median([sample.recomputed for sample in own]))),
        "split_ms": split | {"engine": ttft["median"] - sum(split.values())},
    }
