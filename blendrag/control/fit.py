"""Least squares for times: few points, over a hundredfold range, of sums of costs that cannot be negative."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

Coefficients = tuple[float, ...]


def fit_times(terms: Sequence[Sequence[float]], seconds: Sequence[float]) -> Coefficients:
    """Return non-negative coefficients c that make ``terms @ c`` close to ``seconds``, by relative error.

    terms: [points, n]; seconds: [points], positive. Every subset of the n terms is solved without the
    constraint; the best of those that keep it is the constrained optimum. n is small.
    """
    measured = np.asarray(seconds, dtype=float)
    table = np.asarray(terms, dtype=float) / measured[:, None]
    scale = table.max(axis=0)
    scale[scale == 0] = 1.0
    table = table / scale
    count = table.shape[1]
    best, least = np.zeros(count), float(len(measured))  # all zero: a relative error of 1 everywhere
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            found = np.linalg.lstsq(table[:, chosen], np.ones(len(measured)), rcond=None)[0]
            error = float(((table[:, chosen] @ found - 1.0) ** 2).sum())
            if found.min() >= 0 and error < least:
                best, least = np.zeros(count), error
                best[list(chosen)] = found
    return tuple(float(value) for value in best / scale)


def evaluate(coefficients: Coefficients, terms: Sequence[float]) -> float:
    """Return the seconds that the fit gives."""
    return sum(c * term for c, term in zip(coefficients, terms, strict=True))
