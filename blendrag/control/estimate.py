"""Estimates of how long prefilling, recomputing and loading would take, from a profile (CacheBlend, section
5.1).

Everything is about the whole prompt and the whole model: bytes and seconds of all layers, on both sides of
every comparison. (The paper's text speaks of one layer's KV, its footnotes' formulas of the whole.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from blendrag.control.fit import Coefficients, evaluate, fit_times
from blendrag.control.profile import BlendPoint, PrefillPoint, Profile, TierSpeed
from blendrag.options import BlendOptions


@dataclass(frozen=True, slots=True)
class PrefillCurve:
    """Seconds of vLLM's prefill of ``new`` tokens behind ``cached`` ones.

    They are a + b new + c (pairs of tokens that attend), fitted to all points, times a correction that makes
    it exact at them and is bilinear between them. Beyond the grid the nearest correction holds, so that a
    longer prompt grows by the quadratic term, not along a straight line.
    """

    coefficients: Coefficients
    cached: tuple[int, ...]
    new: tuple[int, ...]
    corrections: tuple[tuple[float, ...], ...]  # [cached, new]

    @classmethod
    def fit(cls, points: Sequence[PrefillPoint]) -> PrefillCurve:
        terms = [_prefill_terms(point.cached, point.new) for point in points]
        coefficients = fit_times(terms, [point.seconds for point in points])
        found = {
            (point.cached, point.new): point.seconds / evaluate(coefficients, own)
            for point, own in zip(points, terms, strict=True)
        }
        cached = tuple(sorted({point.cached for point in points}))
        new = tuple(sorted({point.new for point in points}))
        return cls(
            coefficients, cached, new, tuple(tuple(found.get((c, n), 1.0) for n in new) for c in cached)
        )

    def seconds(self, cached: int, new: int) -> float:
        if new <= 0:
            return 0.0
        along_new = [np.interp(new, self.new, row) for row in self.corrections]
        correction = float(np.interp(cached, self.cached, along_new))
        return evaluate(self.coefficients, _prefill_terms(cached, new)) * correction


def _prefill_terms(cached: int, new: int) -> tuple[float, ...]:
    return 1.0, new, new * (cached + (new + 1) / 2)


@dataclass(frozen=True, slots=True)
class Recompute:
    """Seconds of the fused prefill of ``cached`` tokens, ``ratio`` of them recomputed, and ``fresh`` ones.

    The paper has T_recompute = r * Prefill(L). But the first layers and the writing of KV cost time for every
    token whatever the ratio, and fresh tokens are always computed. So it is fitted to measurements: a call,
    every token, every computed token, the pairs in which a computed token attends, and every cached token
    where some are chosen at a check layer (at ratio 0 none are). Above 0 it is linear in the ratio.
    """

    coefficients: Coefficients

    @classmethod
    def fit(cls, points: Sequence[BlendPoint]) -> Recompute:
        terms = [_recompute_terms(point.cached, point.fresh, point.ratio) for point in points]
        return cls(fit_times(terms, [point.seconds for point in points]))

    def seconds(self, cached: int, fresh: int, ratio: float) -> float:
        a, b, c, d, e = self.coefficients  # written out: this is most of what a decision computes
        tokens, computed = cached + fresh, ratio * cached + fresh
        return a + b * tokens + (c + d * tokens) * computed + (e * cached if ratio else 0.0)


def _recompute_terms(cached: int, fresh: int, ratio: float) -> tuple[float, ...]:
    tokens, computed = cached + fresh, ratio * cached + fresh
    return 1.0, tokens, computed, computed * tokens, cached if ratio else 0.0


@dataclass(frozen=True, slots=True)
class Estimator:
    """All estimates of one profile. Pure, and quick enough to be asked for every request.

    prefill: to the first token of plain prefill. recompute: T_recompute, the KV at hand. reads_question:
    whether the selector does. It then needs all layers loaded before it recomputes anything.
    """

    layers: int
    prefill: PrefillCurve
    recompute: Recompute
    overhead_s: float
    tiers: Mapping[str, TierSpeed]
    reads_question: bool = False

    @classmethod
    def of(cls, profile: Profile) -> Estimator:
        """Make the estimates of a profile. Raises ConfigError for a profile of an unknown selector."""
        from blendrag.select import make_selector  # imports torch

        prefill = PrefillCurve.fit(profile.prefill)
        return cls(
            profile.layers,
            prefill,
            Recompute.fit(profile.blend),
            median(point.overhead_s for point in profile.blend),
            dict(profile.tiers),
            make_selector(BlendOptions(0.5, profile.selector)).reads_question,
        )

    def load_s(self, nbytes: int, tier: str) -> float:
        """Return T_load: latency * calls + bytes / throughput; whole prompt, all layers. 0 bytes need no
        call.

        Raises KeyError for a tier that was not measured.
        """
        speed = self.tiers[tier]
        return speed.latency_s * speed.calls + nbytes / speed.bytes_per_s if nbytes else 0.0

    def hides_loading(self, ratio: float) -> bool:
        """Return whether layers load while others are recomputed. At ratios 0 and 1 there is nothing to
        choose, so the question is not read first."""
        return not self.reads_question or ratio in (0.0, 1.0)

    def blend_s(self, load_s: float, recompute_s: float, ratio: float) -> float:
        """Return the time to the first token of a blended prompt, ``ratio`` of whose cached tokens are
        recomputed.

        Where nothing is hidden it is the sum of both, and so a little too much: reading the question, which
        is in ``recompute_s``, does overlap with loading, but was not measured apart.
        """
        if self.hides_loading(ratio):
            return self.overhead_s + pipelined_s(load_s, recompute_s, self.layers)
        return self.overhead_s + load_s + recompute_s


def pipelined_s(load_s: float, recompute_s: float, layers: int) -> float:
    """Return the time if layer i+1 loads while layer i is recomputed (paper, section 5): the longer of the
    two, and one layer of the shorter that nothing can hide: the first to load, or the last to recompute."""
    return max(load_s, recompute_s) + min(load_s, recompute_s) / layers
