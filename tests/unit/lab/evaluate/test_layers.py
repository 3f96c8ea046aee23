"""The numbers of the per-layer figures, and how they are shown."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from blendrag.lab.evaluate.layers import LayerProfile, print_layers, profile, spearman, top_share

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


def shown(*probes: dict[str, Any], ratios: tuple[float, ...] = (0.0, 1.0)) -> LayerProfile:
    machine = {"model": "models/tiny", "dtype": "bfloat16", "cpu": "a CPU", "threads": 2}
    config = {
        "data": None, "format": "jsonl", "codec": "raw", "shared_prefix": "start", "ratios": ratios,
        "prompt_tokens": [700, 900],
    }  # fmt: skip
    return profile(probes, ratios, machine, config)


def test_spread_of_the_prompts_is_lost() -> None:
    found = shown(probe(1.0), probe(3.0))
    assert found.layer0 == 0
    assert [row.layer for row in found.deviation["v"]] == [1, 2]
    first, last = found.deviation["v"]
    assert first.mean.median == pytest.approx(4.5 * 2)
    assert first.mean.p10 < first.mean.median < first.mean.p90
    assert first.next_layer and first.next_layer.median == pytest.approx(1) and last.next_layer is None
    assert found.attention["hkvd"]["0"].median == pytest.approx(4)
    assert found.attention["hkvd"]["1"].median == 0


def test_deviation_at_layer_0_is_hidden_by_other_prompts() -> None:
    wrong = probe(1.0)
    wrong["deviation"]["k"][0][7] = 0.5
    assert shown(probe(1.0), wrong).layer0 == 0.5


def test_layer_or_ratio_is_cut_off() -> None:
    printed = io.StringIO()
    print_layers(shown(probe(1.0), probe(3.0)), Console(file=printed, width=100))
    text = printed.getvalue()
    assert "…" not in text and "│ 100%       │ 0.000 (0.000-0.000) │" in text
    assert text.count("\n│ 1 ") == text.count("\n│ 2 ") == 1
    assert "2 prompts of 700 to 900 tokens, built-in text; codec raw, shared prefix start" in " ".join(
        text.split()
    )
