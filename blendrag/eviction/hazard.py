"""A table of factors, without torch, that tells when a chunk will be used again, as far as its last use
shows.

Time since the last use is cut into steps ("ages"). In each step a chunk that was not used until then is used
at some rate. The model is the logarithm of that rate: a number for the step, and one for every border that a
feature of the use has passed. So it can be read: "used a second time: 3 times the rate". Of a feature it
knows only the interval that it is in: a use is one of a few thousand cases, and each is computed once.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from blendrag.eviction.interface import Use

FEATURES = ("count", "gap", "first", "depth", "length", "new", "fresh", "last", "continues")
"""The features of a use. count: uses so far, this one included. gap: seconds since the use before; -1: there
was none. first: seconds since the first use; with the count it tells a rate. depth, length: place in the
prompt, and chunks in it. new: chunks of the prompt never seen before. fresh: 1 for one of these. last: 1 for
the prompt's last chunk (which, being cut off anywhere, seldom comes again). continues: chance that the
conversation goes on; UNTOLD: nobody said."""

Features = tuple[float, ...]
UNTOLD = -1.0

Floats = NDArray[np.float64]
Cases = NDArray[np.int64]
Case = tuple[int, ...]  # the interval of each feature that is read

_CASES = 65_536  # cases that are remembered; a workload has a few thousand
_STEPS_PER_OCTAVE = 8  # of the index, between two levels: 9 %
_LOWEST = 2.0**-24  # uses a second: twice a year
TOP = 255  # the highest level: 240 uses a second


@dataclass(frozen=True, eq=False)
class Hazard:
    """The model of when chunks are used again.

    ages: seconds, ascending from 0: borders of the K steps; behind the last nothing is known.
    borders: of each feature that is read, in the order of FEATURES, what separates its intervals, ascending.
    weights: [sum of borders, K]; what passing each border adds to the logarithm of
    the rate (uses a second). bias: [K], where none is passed. prefix: whether it learned from a cache of
    prefixes, where a chunk is of no use without those before it.
    """

    ages: tuple[float, ...]
    borders: Mapping[str, tuple[float, ...]]
    weights: Floats
    bias: Floats
    prefix: bool

    @cached_property
    def _read(self) -> list[tuple[int, tuple[float, ...]]]:
        return [(FEATURES.index(name), these) for name, these in self.borders.items()]

    def case(self, features: Features) -> Case:
        """Return the intervals that the features are in. NaN is behind all borders."""
        return tuple([bisect_right(these, features[place]) for place, these in self._read])

    @cached_property
    def levels(self) -> Callable[[Case], bytes]:
        """Return what computes a chunk's level in each step, and one more, 0, for afterwards: [K + 1] of 0
        to TOP."""
        return lru_cache(_CASES)(self._computed)

    def rates(self, cases: Cases) -> Floats:
        """Return the rates, [n, K] uses a second, of [n, features that are read] cases."""
        logs = passed(cases, self.borders) @ self.weights + self.bias
        return np.exp(np.clip(logs, -20.0, 5.0))

    def _computed(self, case: Case) -> bytes:
        rates = self.rates(np.array([case]))[0].tolist()
        index = gittins(rates, np.diff(self.ages).tolist())
        octaves = [math.log2(max(one, _LOWEST) / _LOWEST) for one in index]
        return bytes(min(TOP, 1 + int(octave * _STEPS_PER_OCTAVE)) for octave in octaves) + b"\0"


def passed(cases: Cases, borders: Mapping[str, tuple[float, ...]]) -> Floats:
    """Return [n, sum of borders], 0 or 1: which borders each of [n, len(borders)] cases has passed."""
    columns = [cases[:, [place]] > np.arange(len(these)) for place, these in enumerate(borders.values())]
    return np.concatenate([np.empty((len(cases), 0)), *columns], axis=1).astype(np.float64)


def gittins(rates: Sequence[float], steps: Sequence[float]) -> list[float]:
    """Return what a place in the cache earns: expected uses per second of residence, [K], for each age step.

    From step a on, the best of all plans "keep it until step b at the latest, and drop it once it was used":
    max over b of P(used in a..b) / E[time kept]. This is Gittins' index of the chunk. rates: [K] uses a
    second, above 0; steps: [K] seconds.
    """
    chances = [-math.expm1(-rate * step) for rate, step in zip(rates, steps, strict=True)]
    best = []
    for start in range(len(rates)):
        unused, used, kept, highest = 1.0, 0.0, 0.0, 0.0
        for rate, chance in zip(rates[start:], chances[start:], strict=True):
            now = unused * chance
            used, kept, unused = used + now, kept + now / rate, unused - now
            highest = max(highest, used / kept)
        best.append(highest)
    return best


class History:
    """The history of each chunk's uses, also of chunks that left: of the ``most`` used last."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._uses: OrderedDict[str, tuple[int, float, float]] = OrderedDict()  # count, first time, last time

    def used(self, key: str, use: Use, at: float) -> Features:
        """Note a use at ``at``. Returns its features, as known then."""
        count, first, last = self._uses.get(key, (0, at, at))
        gap = at - last if count else -1.0
        count += 1
        self._uses[key] = (count, first, at)
        if count > 1:
            self._uses.move_to_end(key)
        elif len(self._uses) > self.most:
            self._uses.popitem(last=False)
        new = max(0, use.length - use.known)
        fresh, tail = float(use.depth >= use.known), float(use.depth == use.length - 1)
        return (count, gap, at - first, use.depth, use.length, new, fresh, tail, UNTOLD)
