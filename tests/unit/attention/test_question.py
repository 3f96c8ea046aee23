from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendrag.attention import question
from blendrag.attention.question import question_attention
from blendrag.attention.scores import Scores


def dense_mass(query: torch.Tensor, key: torch.Tensor, positions: list[int], scores: Scores) -> torch.Tensor:
    """[n_total] the same, head by head and row by row."""
    mass = torch.zeros(key.shape[0], dtype=torch.float64)
    group = query.shape[1] // key.shape[1]
    for row, position in enumerate(positions):
        first = max(0, position + 1 - (scores.window or position + 1))
        for head in range(query.shape[1]):
            products = key[first : position + 1, head // group].double() @ query[row, head].double()
            bent = products * scores.scale
            if scores.soft_cap:
                bent = scores.soft_cap * torch.tanh(bent / scores.soft_cap)
            sink = bent.new_empty(0) if scores.sinks is None else scores.sinks[head].double()[None]
            mass[first : position + 1] += torch.softmax(torch.cat([bent, sink]), 0)[: bent.numel()]
    return mass


@given(
    st.integers(1, 20),
    st.integers(0, 9),
    st.integers(1, 12),
    st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    st.sampled_from([None, 1, 7, 25]),
    st.sampled_from([0.0, 0.5]),
    st.booleans(),
    st.integers(0, 9),
    st.sampled_from([1, 97, 1 << 22]),
)
def test_question_sees_only_what_is_in_sight_and_no_mass_is_lost(
    cached: int,
    between: int,
    asking: int,
    heads: tuple[int, int],
    window: int | None,
    soft_cap: float,
    has_sinks: bool,
    seed: int,
    at_once: int,
) -> None:
    """Cached tokens, fresh ones among them, and the question's behind both."""
    generator = torch.Generator().manual_seed(seed)
    n = cached + between + asking
    fresh = torch.randperm(cached + between, generator=generator)[:between].sort().values
    fresh = torch.cat([fresh, torch.arange(n - asking, n)])
    is_cached = torch.ones(n, dtype=torch.bool)
    is_cached[fresh] = False
    at = torch.arange(n)[is_cached]
    query = torch.randn(asking, heads[0], 8, generator=generator)
    key = torch.randn(n, heads[1], 8, generator=generator)
    sinks = torch.randn(heads[0], generator=generator) if has_sinks else None
    scores = Scores(0.4, window, soft_cap, sinks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(question, "_SCORES_AT_ONCE", at_once)
        found = question_attention(query, fresh[-asking:], key[at], at, key[fresh], fresh, scores)
    assert found.dtype == torch.float32
    expected = dense_mass(query, key, fresh[-asking:].tolist(), scores)[is_cached]
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-5)


def test_bands_of_a_long_prompt_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    softmax = torch.Tensor.softmax

    def noted(scores: torch.Tensor, dim: int) -> torch.Tensor:
        sizes.append(scores.numel())
        return softmax(scores, dim)

    monkeypatch.setattr(torch.Tensor, "softmax", noted)
    query, key = torch.zeros(100, 32, 4), torch.zeros(6000, 4, 4)
    asking = torch.arange(5900, 6000)
    found = question_attention(query, asking, key[:5900], torch.arange(5900), key[5900:], asking, Scores(1.0))
    assert max(sizes) <= 1 << 22 and len(sizes) > 1
    expected = sum(32 / (at + 1) for at in range(5900, 6000))
    assert found.tolist() == pytest.approx([expected] * 5900, rel=1e-3)


def test_no_question_pays_no_attention() -> None:
    nobody = torch.zeros(0, dtype=torch.int64)
    key = torch.ones(3, 1, 4)
    none = question_attention(
        torch.zeros(0, 2, 4), nobody, key, torch.arange(3), key[:0], nobody, Scores(1.0)
    )
    assert none.tolist() == [0.0, 0.0, 0.0]
