from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from blendrag.attention.dense import masked_attention
from blendrag.attention.runs import dense_attention

POSITIONS = st.sets(st.integers(0, 80), min_size=1, max_size=60).map(sorted)


@given(POSITIONS, st.sampled_from([(1, 1), (4, 2), (3, 1)]), st.integers(0, 9))
def test_no_band_of_queries_sees_a_key_too_many_or_too_few(
    positions: list[int], heads: tuple[int, int], later: int
) -> None:
    generator = torch.Generator().manual_seed(len(positions))
    query = torch.randn(len(positions), heads[0], 8, generator=generator)
    key, value = torch.randn(2, positions[-1] + 1 + later, heads[1], 8, generator=generator)
    at = torch.tensor(positions)
    found = masked_attention(query, key, value, at, scale=0.3)
    torch.testing.assert_close(found, dense_attention(query, key, value, at, 0.3), rtol=1e-4, atol=1e-5)


def test_masked_attention_keeps_the_type_of_its_queries() -> None:
    query, key, value = torch.randn(3, 6, 2, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    at = torch.arange(6)
    found = masked_attention(query, key, value, at, scale=0.3)
    assert found.dtype == torch.bfloat16 and found.shape == query.shape
    exact = dense_attention(query, key, value, at, 0.3)
    torch.testing.assert_close(found.float(), exact, rtol=0.02, atol=0.02)
