"""The classifier: what it learns, that its odds are right, and how that is measured."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendrag.forecast.classifier import Classifier, shapes
from blendrag.forecast.features import SCALARS
from blendrag.lab.eviction.fit_classifier import Examples, auc, calibration_error, fit, quality_of

pytestmark = pytest.mark.slow

PAIRS = st.lists(
    st.tuples(st.booleans(), st.sampled_from([0.0, 0.1, 0.35, 0.5, 0.9, 1.0])), min_size=1, max_size=40
)


@given(PAIRS)
def test_auc_is_the_share_of_pairs_in_order(pairs: list[tuple[bool, float]]) -> None:
    ones = [score for truth, score in pairs if truth]
    zeros = [score for truth, score in pairs if not truth]
    won = [(one > zero) + (one == zero) / 2 for one in ones for zero in zeros]
    truth, score = (np.array(column) for column in zip(*pairs, strict=True))
    assert auc(truth, score.astype(float)) == pytest.approx(np.mean(won) if won else 0.5)


@given(PAIRS)
def test_bin_of_forecasts_is_lost_or_counted_twice(pairs: list[tuple[bool, float]]) -> None:
    truth, score = (np.array(column) for column in zip(*pairs, strict=True))
    score = score.astype(float)
    bins = np.minimum((score * 10).astype(int), 9)
    off = sum(abs((score - truth)[bins == each].sum()) for each in range(10)) / len(pairs)
    assert calibration_error(truth, score) == pytest.approx(off)


def test_forecasts_that_are_right_on_average_are_calibrated() -> None:
    truth = np.array([True] * 9 + [False])
    assert quality_of(truth, np.full(10, 0.9)).calibration_error == pytest.approx(0.0)
    assert quality_of(truth, np.full(10, 0.5)).calibration_error == pytest.approx(0.4)
    assert quality_of(truth, np.full(10, 0.5)).brier == pytest.approx(0.25)


def drawn(count: int, rate: float, seed: int = 0) -> Examples:
    """Outcomes that follow from the last column, at ``rate`` on average."""
    random = np.random.default_rng(seed)
    rows = random.normal(size=(count, 4 + len(SCALARS))).astype(np.float32)
    chance = 1 / (1 + np.exp(-(rows[:, -1] + np.log(rate / (1 - rate)))))
    return Examples(rows, random.random(count) < chance, [str(each) for each in range(count)])


@pytest.mark.parametrize("rate", [0.1, 0.9])
def test_weight_of_the_rarer_outcome_does_not_bias_the_odds(rate: float) -> None:
    known = drawn(3000, rate)
    fitted = fit(known, drawn(800, rate, 1), np.arange(7), seed=0)
    test = drawn(3000, rate, 2)
    probability = fitted.classifier.probability(test.rows)
    assert probability.mean() == pytest.approx(test.continues.mean(), abs=0.04)
    assert auc(test.continues, probability) > 0.65


def test_best_epoch_is_kept_and_not_the_last() -> None:
    valid = drawn(200, 0.5, 1)
    fitted = fit(drawn(100, 0.5), valid, np.arange(7), seed=0)
    probability = fitted.classifier.probability(valid.rows)
    loss = -np.mean(np.log(np.where(valid.continues, probability, 1 - probability)))
    assert loss == pytest.approx(min(fitted.losses)) and fitted.loss == min(fitted.losses)


def test_seed_decides_everything() -> None:
    known, valid = drawn(200, 0.5), drawn(100, 0.5, 1)
    first, again, other = (fit(known, valid, np.arange(7), seed).losses for seed in (3, 3, 4))
    assert first == again != other


def test_numpy_computes_what_torch_trained() -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(into, out) for (out, into), _ in shapes(5)]
    model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
    copied = tuple((layer.weight.detach().numpy(), layer.bias.detach().numpy()) for layer in layers)
    mean, scale = np.full(5, 0.5, np.float32), np.full(5, 2.0, np.float32)
    rows = np.random.default_rng(0).normal(size=(9, 8)).astype(np.float32)
    columns = np.array([0, 2, 3, 5, 7])
    with torch.no_grad():
        wanted = model(torch.from_numpy((rows[:, columns] - mean) / scale))[:, 0].numpy()
    assert np.allclose(Classifier(columns, mean, scale, copied).logits(rows), wanted, atol=1e-5)


def test_conversation_is_never_in_both_parts() -> None:
    known = drawn(1000, 0.5)
    known = Examples(known.rows, known.continues, [str(number // 5) for number in range(1000)])
    rest, taken = known.split(0.3, 0, "x")
    assert not set(rest.dialogs) & set(taken.dialogs)
    assert len(rest.dialogs) + len(taken.dialogs) == 1000 and 200 < len(taken.dialogs) < 400
