"""Fit the classifier to rows whose outcome is known (LPC section 3.3), and say how good its forecasts are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import nn

from blendrag.eviction.hazard import Floats
from blendrag.forecast.classifier import Array, Classifier, ForecastQuality, shapes
from blendrag.forecast.features import SCALARS

Labels = npt.NDArray[np.bool_]

LEARNING_RATE = 5e-4
EPOCHS = 20
_BATCH = 64  # the paper does not say
_LEAST = 1e-3  # a scalar that is always the same is not blown up
VALIDATION_SHARE = 0.2  # of what is trained on
_BINS = 10  # of forecasts, to compare with what happened


@dataclass(frozen=True, slots=True)
class Examples:
    """Rows [n, width], their outcomes [n] and the conversations [n] that they are from."""

    rows: Array
    continues: Labels
    dialogs: Sequence[str]

    def where(self, chosen: Labels) -> Examples:
        dialogs = [dialog for dialog, wanted in zip(self.dialogs, chosen, strict=True) if wanted]
        return Examples(self.rows[chosen], self.continues[chosen], dialogs)

    def split(self, share: float, seed: int, salt: str) -> tuple[Examples, Examples]:
        """(the others, about ``share`` of the conversations). A conversation is wholly in one of them."""
        taken = np.array([belongs(dialog, share, seed, salt) for dialog in self.dialogs], dtype=bool)
        return self.where(~taken), self.where(taken)

    @property
    def one_sided(self) -> bool:
        """Whether all go on or none do, so that nothing can be learned."""
        return not self.continues.any() or bool(self.continues.all())


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """The best classifier, its loss in nats on what was not fitted, and that of every epoch."""

    classifier: Classifier
    loss: float
    losses: tuple[float, ...]


def belongs(dialog: str, share: float, seed: int, salt: str) -> bool:
    """Whether a conversation is in the part that ``salt`` names: the same however the file is ordered."""
    return xxhash.xxh3_64_intdigest(f"{seed}\0{salt}\0{dialog}".encode()) < share * 2**64


def fit(train: Examples, valid: Examples, columns: npt.NDArray[np.int64], seed: int) -> Fitted:
    """Adam on the weighted loss; the epoch that is best on ``valid`` is kept. Both parts have both outcomes.

    The rarer outcome counts as much as the other in the loss, which shifts the odds that are learned by the
    ratio of the weights. Eviction compares log odds across conversations and with time, so they have to be
    right: the logarithm of that ratio is taken off again, and epochs are compared by the plain loss.
    """
    rows = train.rows[:, columns]
    # Vectors have length 1 and keep it: with all their numbers scaled up to 1, an epoch already overfits.
    scalar = columns >= train.rows.shape[1] - len(SCALARS)
    mean, scale = rows.mean(axis=0), np.where(scalar, rows.std(axis=0) + _LEAST, 1.0).astype(np.float32)
    inputs = torch.from_numpy((rows - mean) / scale)
    targets = torch.from_numpy(train.continues.astype(np.float32))
    went_on = float(train.continues.mean())
    weight_on, weight_off = max(1.0, (1 - went_on) / went_on), max(1.0, went_on / (1 - went_on))
    weights = torch.where(targets > 0.5, weight_on, weight_off)
    shift = float(np.log(weight_on / weight_off))

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = _mlp(len(columns))
        adam = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        best: Classifier | None = None
        losses: list[float] = []
        for _ in range(EPOCHS):
            for batch in torch.randperm(len(inputs)).split(_BATCH):
                adam.zero_grad()
                loss = nn.functional.binary_cross_entropy_with_logits(
                    model(inputs[batch])[:, 0], targets[batch], weights[batch]
                )
                loss.backward()
                adam.step()
            classifier = Classifier(columns, mean, scale, _layers(model, shift))
            losses.append(log_loss(valid.continues, classifier.probability(valid.rows)))
            if best is None or losses[-1] == min(losses):
                best = classifier
    assert best is not None
    return Fitted(best, min(losses), tuple(losses))


def _mlp(used: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for (out, into), _ in shapes(used):
        layers += [nn.Linear(into, out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _layers(model: nn.Sequential, shift: float) -> tuple[tuple[Array, Array], ...]:
    copied = [
        (layer.weight.detach().numpy().copy(), layer.bias.detach().numpy().copy())
        for layer in model
        if isinstance(layer, nn.Linear)
    ]
    copied[-1][1][:] -= np.float32(shift)
    return tuple(copied)


def quality_of(truth: Labels, probability: Floats) -> ForecastQuality:
    """truth, probability: [n], n > 0."""
    return ForecastQuality(
        auc=auc(truth, probability),
        brier=float(np.mean((probability - truth) ** 2)),
        log_loss=log_loss(truth, probability),
        calibration_error=calibration_error(truth, probability),
    )


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


def calibration_error(truth: Labels, probability: Floats) -> float:
    """Forecasts in equal parts of [0, 1]."""
    number = np.minimum((probability * _BINS).astype(int), _BINS - 1)
    return float(np.abs(np.bincount(number, probability - truth, _BINS)).sum() / len(truth))
