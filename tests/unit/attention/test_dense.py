from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendrag.attention.dense import masked_attention
from blendrag.attention.runs import dense_attention
from blendrag.attention.scores import Scores

POSITIONS = st.sets(st.integers(0, 80), min_size=1, max_size=60).map(sorted)


@given(
    POSITIONS,
    st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    st.integers(0, 9),
    st.sampled_from([None, 1, 7, 100]),
)
def test_no_band_of_queries_sees_a_key_too_many_or_too_few(
    positions: list[int], heads: tuple[int, int], later: int, window: int | None
) -> None:
    generator = torch.Generator().manual_seed(len(positions))
    query = torch.randn(len(positions), heads[0], 8, generator=generator)
    key, value = torch.randn(2, positions[-1] + 1 + later, heads[1], 8, generator=generator)
    scores = Scores(0.3, window)
    found = masked_attention(query, key, value, np.array(positions), scores)
    expected = dense_attention(query, key, value, torch.tensor(positions), scores)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_masked_attention_keeps_the_type_of_its_queries() -> None:
    query, key, value = torch.randn(3, 6, 2, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = masked_attention(query, key, value, np.arange(6), Scores(0.3))
    assert found.dtype == torch.bfloat16 and found.shape == query.shape
    exact = dense_attention(query, key, value, torch.arange(6), Scores(0.3))
    torch.testing.assert_close(found.float(), exact, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("scores", [Scores(0.3, soft_cap=5.0), Scores(0.3, sinks=torch.zeros(2))])
def test_cap_or_sinks_are_quietly_left_out(scores: Scores) -> None:
    query, key, value = torch.randn(3, 6, 2, 8)
    with pytest.raises(AssertionError, match="neither"):
        masked_attention(query, key, value, np.arange(6), scores)
