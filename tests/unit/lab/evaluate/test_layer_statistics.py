"""The numbers of the per-layer figures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.lab.evaluate.layer_statistics import spearman, summarise_probes, top_share

DIFFERENT = st.lists(st.floats(0, 1e6), min_size=3, max_size=40, unique=True)


@given(DIFFERENT)
def test_same_ranks_correlate_fully_whatever_the_values(values: list[float]) -> None:
    ranks = [float(sorted(values).index(value)) for value in values]
    assert spearman(values, [rank**3 for rank in ranks]) == pytest.approx(1)
    assert spearman(values, [-rank for rank in ranks]) == pytest.approx(-1)


def test_ties_share_their_mean_rank() -> None:
    # Ranks 1, 2.5, 2.5, 4 against 1, 3, 2, 4: Pearson's coefficient of these by hand.
    assert spearman([1, 5, 5, 9], [1, 3, 2, 4]) == pytest.approx(4.5 / np.sqrt(4.5 * 5))


def test_layer_in_which_nothing_deviates_correlates_with_none() -> None:
    assert spearman([0, 0, 0], [1, 2, 3]) == 0


def test_tokens_that_hold_everything_are_seen() -> None:
    assert top_share([0.0] * 90 + [1.0] * 10) == 1
    assert top_share([1.0] * 100) == pytest.approx(0.15)
    assert top_share([0.0] * 100) == 0.15


def probe(scale: float) -> dict[str, Any]:
    """Three layers of ten tokens, two ratios; layer 0 does not deviate."""
    layers = [[0.0] * 10, [scale * n for n in range(10)], [scale * n * n for n in range(10)]]
    return {"deviation": {"v": layers, "k": layers}, "attention": {"hkvd": [[scale, 3 * scale], [0.0, 0.0]]}}


def test_prompts_are_averaged_and_their_spread_is_kept() -> None:
    found = summarise_probes([probe(1.0), probe(3.0)], (0.0, 1.0))
    assert found["layer0"] == 0
    assert [row["layer"] for row in found["deviation"]["v"]] == [1, 2]
    first = found["deviation"]["v"][0]
    assert first["mean"]["mean"] == pytest.approx(4.5 * 2)
    assert first["mean"]["p10"] < first["mean"]["mean"] < first["mean"]["p90"]
    assert first["above"]["1"]["mean"] == pytest.approx((8 / 10 + 9 / 10) / 2)
    assert found["spearman"]["k"] == [pytest.approx({"layer": 1, "mean": 1, "p10": 1, "p90": 1})]
    assert found["attention"]["hkvd"]["0"]["mean"] == pytest.approx(4)
    assert found["attention"]["hkvd"]["1"]["mean"] == 0


def test_deviation_at_layer_0_is_not_hidden_by_the_mean() -> None:
    wrong = probe(1.0)
    wrong["deviation"]["k"][0][7] = 0.5
    assert summarise_probes([probe(1.0), wrong], (0.0, 1.0))["layer0"] == 0.5
