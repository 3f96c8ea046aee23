"""When a chunk will be used again, as far as its last use tells: a small table-like model, without torch.

Time since the last use is cut into steps ("ages"). For each step the model gives the chance that a chunk
which was not used until then is used in it: a discrete hazard. It reads nothing but which interval each
feature of the use falls into, so that a use is one of a few thousand cases, and each case is computed once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from blendrag.eviction.history import FEATURES, Features

Array = NDArray[np.float32]
Case = tuple[int, ...]  # of each feature in FEATURES, the interval it is in

_CASES = 65_536  # are remembered; a workload has a few thousand
_STEPS_PER_OCTAVE = 8  # of the index, between two levels: 9 %
_LOWEST = 2.0**-24  # uses a second; twice a year
TOP = 1 + 24 * _STEPS_PER_OCTAVE + 63  # the highest level: 240 uses a second


@dataclass(frozen=True, slots=True, eq=False)
class Hazard:
    """The model: which intervals there are, and two layers over the intervals' thermometer code.

    ages: seconds, ascending from 0: borders of the K steps; behind the last nothing is known.
    borders: of each feature that is read, ascending, what separates its intervals. weights: [inputs, hidden]
    and [hidden, K], biases: [hidden] and [K]; inputs = all borders of all features, in the order of FEATURES:
    1 for each border that the feature reaches. prefix: whether it learned from a cache of prefixes, where a
    chunk is of no use without those before it.
    """

    ages: tuple[float, ...]
    borders: Mapping[str, tuple[float, ...]]
    weights: tuple[Array, Array]
    biases: tuple[Array, Array]
    prefix: bool
    _levels: dict[Case, bytes] = field(default_factory=dict, repr=False)

    def case(self, features: Features) -> Case:
        """Which intervals the features are in. What is not read is in interval 0, as is NaN."""
        borders = self.borders
        return tuple(
            bisect_right(borders[name], value) if name in borders and value == value else 0
            for name, value in zip(FEATURES, features, strict=True)
        )

    def levels(self, case: Case) -> bytes:
        """The chunk's level in each step, and one more, 0, for afterwards: [K + 1] of 0 to TOP."""
        found = self._levels.get(case)
        if found is None:
            if len(self._levels) >= _CASES:
                self._levels.clear()
            found = self._levels[case] = self._computed(case)
        return found

    def chances(self, cases: NDArray[np.int64]) -> NDArray[np.float64]:
        """[n, K] hazards of [n, features] cases."""
        hidden = np.maximum(self.encoded(cases) @ self.weights[0] + self.biases[0], 0.0)
        logits = (hidden @ self.weights[1] + self.biases[1]).astype(np.float64)
        return 1.0 / (1.0 + np.exp(-np.clip(logits, -50.0, 50.0)))

    def encoded(self, cases: NDArray[np.int64]) -> Array:
        """[n, inputs] of [n, features] cases."""
        return encoded(cases, self.borders)

    def _computed(self, case: Case) -> bytes:
        index = gittins(self.chances(np.array([case])), np.diff(self.ages))[0]
        octaves = np.log2(np.maximum(index, _LOWEST) / _LOWEST)
        return bytes(np.clip(1 + octaves * _STEPS_PER_OCTAVE, 1, TOP).astype(np.uint8)) + b"\0"


def encoded(cases: NDArray[np.int64], borders: Mapping[str, tuple[float, ...]]) -> Array:
    """Thermometer code: for each feature that is read, which of its borders the case reaches."""
    columns = [
        cases[:, place, None] > np.arange(len(borders[name]))
        for place, name in enumerate(FEATURES)
        if name in borders
    ]
    return np.concatenate(columns, axis=1).astype(np.float32)


def gittins(hazards: NDArray[np.float64], steps: NDArray[np.float64]) -> NDArray[np.float64]:
    """What a place in the cache earns: expected uses per second of residence, [n, K], for each age step.

    From step a on, the best of all plans "keep it until step b at the latest, and let go once it was used":
    max over b of P(used in a..b) / E[time kept]. This is Gittins' index of the chunk. hazards: [n, K];
    steps: [K] seconds. A use is taken to fall into the middle of its step.
    """
    best = np.zeros_like(hazards)
    for start in range(hazards.shape[1]):
        unused = np.ones(len(hazards))
        used, kept = np.zeros(len(hazards)), np.zeros(len(hazards))
        for step in range(start, hazards.shape[1]):
            chance = hazards[:, step]
            used += unused * chance
            kept += unused * steps[step] * (1.0 - chance / 2.0)
            unused = unused * (1.0 - chance)
            best[:, start] = np.maximum(best[:, start], used / kept)
    return best
