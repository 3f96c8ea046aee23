"""Intervals of a mean, a difference or a ratio, from the questions that were measured: the paired bootstrap.

Rows are drawn again with replacement, all numbers of a row together (Efron and Tibshirani, An Introduction
to the Bootstrap, chapters 8 and 13); an interval holds 95 % of what is found so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

RESAMPLES = 2_000
_PERCENTILES = (2.5, 97.5)
_SEED = 0


@dataclass(frozen=True, slots=True)
class Interval:
    """A number, and the 95 % interval it lies in: ``low`` <= ``mean`` <= ``high``."""

    mean: float
    low: float
    high: float

    @property
    def within_noise(self) -> bool:
        """Return whether a difference may as well be none."""
        return self.low <= 0.0 <= self.high


def mean(values: npt.ArrayLike) -> Interval:
    """Return the mean of one number per row; at least one row."""
    return _interval(lambda mean: mean, values)


def difference(values: npt.ArrayLike, reference: npt.ArrayLike) -> Interval:
    """Return the mean of values - reference, row by row: what is hard about a row does not count as noise."""
    return mean(np.subtract(values, reference))


def ratio(values: npt.ArrayLike, reference: npt.ArrayLike) -> Interval:
    """Return mean(values) / mean(reference), both means over the same draws; all numbers above 0."""
    return _interval(lambda above, below: above / below, values, reference)


def gap_closed(arm: npt.ArrayLike, full: npt.ArrayLike, reuse: npt.ArrayLike) -> Interval | None:
    """Return 1 - mean(arm - full) / mean(reuse - full), both means over the same draws; 1 is as good as full.

    None if reuse does not differ from full. Draws in which it does not are left out.
    """
    lost, gap = np.subtract(arm, full), np.subtract(reuse, full)
    found = _interval(lambda lost, gap: 1.0 - lost / gap, lost, gap)
    return found if np.isfinite(found.mean) else None


def _interval(statistic: Callable[..., Any], *columns: npt.ArrayLike) -> Interval:
    """Return a statistic of the columns' means. Rows get an order of their own: that of the file must not
    matter."""
    arrays = [np.asarray(column, dtype=np.float64) for column in columns]
    order, rows = np.lexsort(arrays), len(arrays[0])
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        value = float(statistic(*(array[order].mean() for array in arrays)))
        draws = statistic(*(_draws(rows) @ array[order] / rows for array in arrays))
    draws = draws[np.isfinite(draws)]
    low, high = np.percentile(draws, _PERCENTILES) if len(draws) else (value, value)
    # A skewed ratio, or rounding, may leave the number itself just outside.
    return Interval(value, min(float(low), value), max(float(high), value))


@lru_cache(maxsize=4)
def _draws(rows: int) -> npt.NDArray[np.float64]:
    """Return how often each row is in each draw, [RESAMPLES, rows], the same for all numbers."""
    counts = np.random.default_rng(_SEED).multinomial(rows, np.full(rows, 1 / rows), size=RESAMPLES)
    return counts.astype(np.float64)
