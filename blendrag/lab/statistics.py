"""Statistics of samples: the numbers that are shown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from blendrag.lab.arms import PARTS, TOP, Sample

_LEAST = 1e-12  # probability; keeps the logarithm finite


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, 10th and 90th percentile (linear between samples)."""

    median: float
    p10: float
    p90: float

    def shown(self, form: str = ",.0f") -> tuple[str, str]:
        """Return two cells: the median, and the range."""
        return format(self.median, form), f"{self.p10:{form}}-{self.p90:{form}}"


@dataclass(frozen=True, slots=True)
class Percentiles:
    """The 50th and the 95th percentile (linear between samples), and the largest."""

    p50: float
    p95: float
    max: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers of an arm.

    ttft_ms: of trials.
    speedup: by arm, that arm's TTFT / this one's, trial by trial.
    kl_first_token (nats), top1_agreement: means, against full prefill.
    tokens_recomputed, split_ms: medians; the split's ``engine`` is the rest of the median TTFT.
    each_ms: [trial] of TTFT.
    """

    ttft_ms: Spread
    speedup: dict[str, Spread]
    kl_first_token: float
    top1_agreement: float
    tokens_recomputed: int
    split_ms: dict[str, float]
    each_ms: list[float]

    def to_dict(self) -> dict[str, Any]:
        speedups = {f"speedup_vs_{rival}": asdict(own) for rival, own in self.speedup.items()}
        return speedups | {name: value for name, value in asdict(self).items() if name != "speedup"}

    @property
    def blended(self) -> bool:
        """Return whether its time has parts; plain prefill is the engine's alone."""
        return any(self.split_ms[part] for part in PARTS)


def spread(values: Iterable[float]) -> Spread:
    low, middle, high = np.percentile(list(values), (10, 50, 90))
    return Spread(float(middle), float(low), float(high))


def percentiles(values: Sequence[float]) -> Percentiles:
    middle, high = np.percentile(values, (50, 95))
    return Percentiles(float(middle), float(high), float(max(values)))


def next_token_kl(reference: Mapping[int, float], other: Mapping[int, float], top: int = TOP) -> float:
    """Return KL(reference, other) in nats over the reference's ``top`` tokens, all others as one bucket.

    Arguments are {token: log probability} of each side's most likely tokens, and of one that was forced. A
    token ``other`` does not list shares, evenly with the bucket, what its listed tokens leave over; it never
    gets more than the least likely of its own ``top``, whatever was forced.
    """
    tokens = sorted(reference, key=lambda token: -reference[token])[:top]
    listed = {token: math.exp(logprob) for token, logprob in other.items()}
    unlisted = sum(token not in listed for token in tokens)
    left_over = max(0.0, 1.0 - sum(listed.values()))
    guess = min(sorted(listed.values(), reverse=True)[:top][-1], left_over / (unlisted + 1))
    p = [math.exp(reference[token]) for token in tokens]
    q = [listed.get(token, guess) for token in tokens]
    p, q = (np.maximum([*side, 1.0 - sum(side)], _LEAST).tolist() for side in (p, q))
    p, q = ([x / sum(side) for x in side] for side in (p, q))
    return max(0.0, sum(x * math.log(x / y) for x, y in zip(p, q, strict=True)))


def summarise(
    samples: Mapping[str, Sequence[Sample]], rivals: Sequence[str] = ("full",)
) -> dict[str, Summary]:
    """Return the numbers of each arm, by name, ``full`` among them. rivals: whose times are compared."""
    times = {name: np.array([sample.ttft_ms for sample in own]) for name, own in samples.items()}
    found = {}
    for name, own in samples.items():
        pairs = list(zip(own, samples["full"], strict=True))
        ttft = spread(times[name])
        split = {part: float(np.median([s.split_ms.get(part, 0.0) for s in own])) for part in PARTS}
        found[name] = Summary(
            ttft_ms=ttft,
            speedup={rival: spread(times[rival] / times[name]) for rival in rivals},
            kl_first_token=float(np.mean([next_token_kl(b.logprobs, a.logprobs) for a, b in pairs])),
            top1_agreement=float(np.mean([a.token == b.token for a, b in pairs])),
            tokens_recomputed=round(float(np.median([sample.recomputed for sample in own]))),
            split_ms=split | {"engine": ttft.median - sum(split.values())},
            each_ms=times[name].tolist(),
        )
    return found
