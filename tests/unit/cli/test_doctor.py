"""The doctor's arithmetic: what it would miss if it were wrong."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.lab.doctor import DoctorReport, Row, divergence

distributions = st.lists(st.floats(0.01, 1.0), min_size=2, max_size=20).map(
    lambda weights: {i: math.log(w / sum(weights)) for i, w in enumerate(weights)}
)


@given(distributions)
def test_same_distribution_does_not_diverge(p: dict[int, float]) -> None:
    assert divergence(p, p) == pytest.approx(0.0, abs=1e-9)


@given(distributions, distributions)
def test_divergence_is_never_negative(p: dict[int, float], q: dict[int, float]) -> None:
    assert divergence(p, q) >= 0.0


def test_moved_token_is_seen() -> None:
    p = {1: math.log(0.9), 2: math.log(0.1)}
    q = {1: math.log(0.1), 2: math.log(0.9)}
    assert divergence(p, q) > 1.0


def test_report_without_checks_does_not_pass() -> None:
    assert not DoctorReport("m", "A", ()).passed
    assert DoctorReport("m", "A", (Row("c", "0", "0", True),)).passed
    assert not DoctorReport("m", "A", (Row("c", "0", "0", True), Row("d", "1", "0", False))).passed
