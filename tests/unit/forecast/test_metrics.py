"""Metrics against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.lab.training.metrics import Quality, auc, bins, f1_macro, mcc

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
def test_mcc_is_the_correlation(pairs: list[tuple[bool, float]]) -> None:
    truth, score = (np.array(column) for column in zip(*pairs, strict=True))
    said = score >= 0.5
    constant = len({*truth.tolist()}) < 2 or len({*said.tolist()}) < 2
    wanted = 0.0 if constant else np.corrcoef(truth, said)[0, 1]
    assert mcc(truth, said) == pytest.approx(wanted)


def test_f1_counts_both_classes_alike() -> None:
    truth = np.array([True] * 8 + [False] * 2)
    always = np.ones(10, dtype=bool)
    assert f1_macro(truth, always) == pytest.approx((16 / 18 + 0) / 2)
    assert f1_macro(truth, truth) == 1.0


@given(PAIRS)
def test_bins_lose_no_forecast(pairs: list[tuple[bool, float]]) -> None:
    truth, score = (np.array(column) for column in zip(*pairs, strict=True))
    found = bins(truth, score)
    assert sum(each.count for each in found) == len(pairs)
    assert sum(each.count * each.happened for each in found) == pytest.approx(truth.sum())
    rounding = 1e-12  # a mean of equal numbers need not be that number
    assert all(each.low - rounding <= each.forecast <= each.high + rounding for each in found)


def test_forecasts_that_are_right_on_average_are_calibrated() -> None:
    truth = np.array([True] * 9 + [False])
    said = np.ones(10, dtype=bool)
    assert Quality.of(truth, np.full(10, 0.9), said).calibration_error == pytest.approx(0.0)
    assert Quality.of(truth, np.full(10, 0.5), said).calibration_error == pytest.approx(0.4)
    assert Quality.of(truth, np.full(10, 0.5), said).brier == pytest.approx(0.25)
