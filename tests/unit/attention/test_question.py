from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendrag.attention import question
from blendrag.attention.question import question_attention

POSITIONS = st.sets(st.integers(0, 60), min_size=1, max_size=30).map(sorted)


def dense_mass(query: torch.Tensor, key: torch.Tensor, positions: list[int], scale: float) -> torch.Tensor:
    """[n_total] the same, head by head and row by row."""
    mass = torch.zeros(key.shape[0], dtype=torch.float64)
    group = query.shape[1] // key.shape[1]
    for row, position in enumerate(positions):
        for head in range(query.shape[1]):
            seen = key[: position + 1, head // group].double()
            mass[: position + 1] += torch.softmax(seen @ query[row, head].double() * scale, 0)
    return mass


@given(
    POSITIONS,
    st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    st.integers(0, 9),
    st.sampled_from([1, 97, 1 << 22]),
)
def test_no_key_is_seen_before_its_time_and_no_mass_is_lost(
    positions: list[int], heads: tuple[int, int], seed: int, at_once: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    n = positions[-1] + 1 + seed  # keys after the last query are there, and seen by nobody
    query = torch.randn(len(positions), heads[0], 8, generator=generator)
    key = torch.randn(n, heads[1], 8, generator=generator)
    cached = torch.arange(0, n, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(question, "_SCORES_AT_ONCE", at_once)
        found = question_attention(query, key, torch.tensor(positions), 0.4, cached)
        all_of_it = question_attention(query, key, torch.tensor(positions), 0.4, torch.arange(n))
    assert found.dtype == torch.float32
    expected = dense_mass(query, key, positions, 0.4)[cached].float()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert float(all_of_it.sum()) == pytest.approx(len(positions) * heads[0], rel=1e-4)


def test_bands_of_a_long_prompt_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    softmax = torch.Tensor.softmax

    def noted(scores: torch.Tensor, dim: int) -> torch.Tensor:
        sizes.append(scores.numel())
        return softmax(scores, dim)

    monkeypatch.setattr(torch.Tensor, "softmax", noted)
    query, key = torch.zeros(100, 32, 4), torch.zeros(6000, 4, 4)
    found = question_attention(query, key, torch.arange(5900, 6000), 1.0, torch.arange(10))
    assert max(sizes) <= 1 << 22 and len(sizes) > 1
    assert found.tolist() == pytest.approx([sum(32 / (at + 1) for at in range(5900, 6000))] * 10, rel=1e-3)


def test_no_question_pays_no_attention() -> None:
    none = question_attention(
        torch.zeros(0, 2, 4), torch.ones(9, 1, 4), torch.zeros(0, dtype=torch.int64), 1.0, torch.arange(3)
    )
    assert none.tolist() == [0.0, 0.0, 0.0]
