"""When requests arrive, and at which rates: an open loop, which does not wait for answers."""

from __future__ import annotations

import math

import numpy as np

from blendrag.errors import ConfigError

STEP = 1.15  # from one rung of rates to the next: how finely a sustained rate is told
_STRIDE = 3  # rungs, until the rate that is looked for lies between two


def arrival_times(rate: float, seconds: float, seed: int) -> list[float]:
    """Poisson arrivals: seconds from the start, ascending, below ``seconds``.

    The same gaps for every rate, scaled, so that rates differ in nothing else.
    """
    rng, times, now = np.random.default_rng(seed), [], 0.0
    while (now := now + float(rng.exponential()) / rate) < seconds:
        times.append(now)
    return times


def parse_rates(text: str) -> tuple[float, ...]:
    """``"0.5,1"`` as ascending numbers, each once. Raises ConfigError, naming what is wrong."""
    rates = set()
    for word in text.split(","):
        try:
            rate = float(word)
        except ValueError:
            raise ConfigError(f"--rates: {word.strip()!r} is not a number") from None
        if not 0.0 < rate <= 10_000.0:
            raise ConfigError(f"--rates: {rate:g} is not above 0 and at most 10,000 requests a second")
        rates.add(rate)
    return tuple(sorted(rates))


def rung_below(rate: float, base: float) -> int:
    """The highest rung of the ladder base * STEP**rung that is not above ``rate``."""
    return math.floor(math.log(rate / base, STEP) + 1e-9)


class RateSearch:
    """The highest rung that can be sustained, by few tries: strides until it lies between two, then halves.

    It ends past saturation unless ``tries`` run out before.
    """

    def __init__(self, start: int, tries: int) -> None:
        self._start, self._tries = start, tries
        self.sustained: int | None = None
        self.failed: int | None = None

    def next(self) -> int | None:
        """The rung to try now; None: that was all."""
        low, high = self.sustained, self.failed
        if not self._tries:
            return None
        if low is None and high is None:
            return self._start
        if high is None:
            assert low is not None
            return low + _STRIDE
        if low is None:
            return high - _STRIDE
        return (low + high) // 2 if high - low > 1 else None

    def tell(self, rung: int, sustained: bool) -> None:
        """What came of the rung that was tried."""
        self._tries -= 1
        if sustained:
            self.sustained = rung
        else:
            self.failed = rung
