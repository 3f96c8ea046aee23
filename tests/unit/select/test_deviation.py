from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendrag.select import Metric
from blendrag.select.deviation import deviation, squared_deviation, squared_norm


def random(seed: int, n: int = 6) -> torch.Tensor:
    return torch.randn(n, 2, 8, generator=torch.Generator().manual_seed(seed))


def rotated(keys: torch.Tensor, positions: torch.Tensor, base: float = 10_000.0) -> torch.Tensor:
    """RoPE, written out pair by pair."""
    half = keys.shape[-1] // 2
    angles = positions[:, None].double() / base ** (torch.arange(half).double() / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = keys.double().split(half, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).float()


@given(st.integers(0, 9), st.lists(st.integers(0, 30_000), min_size=6, max_size=6))
def test_rotation_does_not_change_the_deviation_of_keys(seed: int, positions: list[int]) -> None:
    fresh, stored, at = random(seed), random(seed + 100), torch.tensor(positions)
    moved = squared_deviation(rotated(fresh, at), rotated(stored, at))
    torch.testing.assert_close(moved, squared_deviation(fresh, stored), rtol=1e-4, atol=1e-4)
    other = squared_deviation(rotated(fresh, at + 1), rotated(stored, at))
    assert not torch.allclose(other, moved)  # the rotation is one


def test_deviation_is_the_squared_distance_of_each_token() -> None:
    fresh, stored = random(1), random(2)
    expected = [float(((fresh[n] - stored[n]) ** 2).sum()) for n in range(6)]
    found = squared_deviation(fresh, stored)
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(expected)
    assert squared_deviation(fresh, fresh).tolist() == [0.0] * 6


def test_measuring_does_not_change_what_is_measured() -> None:
    fresh, stored = random(1), random(2)
    before = fresh.clone(), stored.clone()
    squared_deviation(fresh, stored)
    squared_norm(fresh)
    assert fresh.equal(before[0]) and stored.equal(before[1])


def test_half_precision_does_not_overflow() -> None:
    fresh = torch.full((2, 4, 64), 200.0, dtype=torch.float16)
    assert squared_deviation(fresh, -fresh).tolist() == [400.0**2 * 256] * 2
    assert squared_norm(fresh) == 200.0**2 * 256


@pytest.mark.parametrize("metric", get_args(Metric))
def test_metric_compares_what_it_is_named_after(metric: Metric) -> None:
    key, value, stored_key, stored_value = (random(seed) for seed in range(4))
    found, norm = deviation(metric, key, value, stored_key, stored_value)
    parts = [(key, stored_key)] * ("k" in metric) + [(value, stored_value)] * ("v" in metric)
    torch.testing.assert_close(found, sum(squared_deviation(a, b) for a, b in parts))
    assert norm == pytest.approx(sum(float((a**2).sum()) / 6 for a, _ in parts))


def test_norm_of_no_token_does_not_divide_by_zero() -> None:
    assert squared_norm(torch.empty(0, 2, 8)) == 1.0
