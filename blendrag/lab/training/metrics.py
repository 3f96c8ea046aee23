"""How good forecasts are: as decisions (MCC, macro-F1), as an order (AUC), as probabilities (Brier, bins)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Labels = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

BINS = 10
MOST_TURNS = 50  # of the turns-only predictor; longer conversations are counted together


@dataclass(frozen=True, slots=True)
class Bin:
    """Forecasts in [low, high): how many, their mean, and the share that came true."""

    low: float
    high: float
    count: int
    forecast: float
    happened: float


@dataclass(frozen=True, slots=True)
class Quality:
    """Of forecasts of a yes or no. AUC is 0.5 where only one outcome occurs.

    calibration_error: mean distance of forecast and truth over the bins, weighted by their counts.
    """

    mcc: float
    f1_macro: float
    auc: float
    brier: float
    log_loss: float
    calibration_error: float
    calibration: tuple[Bin, ...]

    @classmethod
    def of(cls, truth: Labels, probability: Floats, said: Labels) -> Quality:
        """truth, probability, said: [n], n > 0; ``said``: what was decided from the probability."""
        calibration = bins(truth, probability)
        distances = [each.count * abs(each.forecast - each.happened) for each in calibration]
        return cls(
            mcc(truth, said),
            f1_macro(truth, said),
            auc(truth, probability),
            float(np.mean((probability - truth) ** 2)),
            log_loss(truth, probability),
            sum(distances) / len(truth),
            calibration,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def mcc(truth: Labels, said: Labels) -> float:
    """Matthews' correlation coefficient: 1 right, 0 chance (and where one side is empty), -1 wrong."""
    hit, false, miss, right = _confusion(truth, said)
    scale = np.sqrt(float(hit + false) * (hit + miss) * (right + false) * (right + miss))
    return float((hit * right - false * miss) / scale) if scale else 0.0


def f1_macro(truth: Labels, said: Labels) -> float:
    """Mean of both classes' F1; a class that neither occurs nor is said has 0."""
    hit, false, miss, right = _confusion(truth, said)
    return float(np.mean([2 * hits / max(1, 2 * hits + false + miss) for hits in (hit, right)]))


def auc(truth: Labels, score: Floats) -> float:
    """The chance that of one of each the one that came true is scored higher; ties count half."""
    ones = int(truth.sum())
    zeros = len(truth) - ones
    if not ones or not zeros:
        return 0.5
    _, place, counts = np.unique(score, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]  # tied scores share the mean of their ranks
    return float((ranks[truth].sum() - ones * (ones + 1) / 2) / (ones * zeros))


def log_loss(truth: Labels, probability: Floats) -> float:
    """Mean surprise, in nats."""
    with np.errstate(divide="ignore"):
        return float(-np.mean(np.log(np.where(truth, probability, 1.0 - probability))))


def bins(truth: Labels, probability: Floats) -> tuple[Bin, ...]:
    """Forecasts in equal parts of [0, 1]; empty parts are left out."""
    number = np.minimum((probability * BINS).astype(int), BINS - 1)
    return tuple(
        Bin(
            each / BINS,
            (each + 1) / BINS,
            int((number == each).sum()),
            float(probability[number == each].mean()),
            float(truth[number == each].mean()),
        )
        for each in np.unique(number).tolist()
    )


@dataclass(frozen=True, slots=True)
class TurnsOnly:
    """The paper's LPCturns (appendix A.3): what the training data did after as many turns.

    rates: of going on, after 1, 2, ... turns.
    """

    rates: tuple[float, ...]

    @classmethod
    def of(cls, turns: npt.NDArray[np.int64], continues: Labels) -> TurnsOnly:
        """turns, continues: [n], n > 0. A count that was not seen takes the rate of the one before it."""
        rates = [float(continues.mean())]
        for count in range(1, min(MOST_TURNS, int(turns.max(initial=1))) + 1):
            here = continues[turns >= count] if count == MOST_TURNS else continues[turns == count]
            rates.append(float(here.mean()) if len(here) else rates[-1])
        return cls(tuple(rates[1:]))

    def probability(self, turns: npt.NDArray[np.int64]) -> Floats:
        return np.asarray(self.rates)[np.clip(turns, 1, len(self.rates)) - 1]

    def quality(self, turns: npt.NDArray[np.int64], truth: Labels) -> Quality:
        """It says what most of the training data did. Certainty is softened: a rate of 1 would cost all."""
        probability = np.clip(self.probability(turns), 0.001, 0.999)
        return Quality.of(truth, probability, probability >= 0.5)


def _confusion(truth: Labels, said: Labels) -> Sequence[int]:
    """True positives, false positives, false negatives, true negatives."""
    pairs = ((truth, said), (~truth, said), (truth, ~said), (~truth, ~said))
    return [int(np.count_nonzero(a & b)) for a, b in pairs]
