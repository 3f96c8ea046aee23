"""Attention over latents, of which V is a part, against the reference with one KV head."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendrag.attention import latent
from blendrag.attention.latent import LatentRows, latent_attention, paged_latent_attention
from blendrag.attention.runs import dense_attention
from blendrag.attention.scores import Scores

SIZE, WIDTH, SCALE = 24, 16, 0.3


@given(st.integers(1, 40), st.integers(1, 6), st.data())
def test_rows_anywhere_see_what_the_reference_does(tokens: int, heads: int, data: st.DataObject) -> None:
    at = sorted(data.draw(st.sets(st.integers(0, tokens - 1), min_size=1)))
    generator = torch.Generator().manual_seed(tokens)
    key = torch.randn(tokens, SIZE, generator=generator)
    query = torch.randn(len(at), heads, SIZE, generator=generator)
    positions = torch.tensor(at)
    expected = dense_attention(query, key[:, None], key[:, None, :WIDTH], positions, Scores(SCALE))
    found = latent_attention(query, key, positions, SCALE, WIDTH)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_bands_of_rows_and_sequences_in_pages_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    cache, query = (torch.randn(*shape, generator=generator) for shape in ((5, 4, SIZE), (9, 2, SIZE)))
    blocks, places = torch.tensor([3, 3, 3, 3, 1, 1, 1]), torch.tensor([0, 1, 2, 3, 0, 1, 2])
    sequences = [
        LatentRows(torch.tensor([0, 2, 8]), torch.tensor([0, 4, 6]), blocks, places),
        LatentRows(torch.tensor([1, 3, 4, 5, 6, 7]), torch.arange(6), blocks[:6], places.flip(0)[:6]),
    ]
    expected = paged_latent_attention(query, cache, sequences, SCALE, WIDTH)
    one = latent_attention(query[[0, 2, 8]], cache[blocks, places], torch.tensor([0, 4, 6]), SCALE, WIDTH)
    assert expected[[0, 2, 8]].equal(one)
    monkeypatch.setattr(latent, "_SCORES_AT_ONCE", 1)
    torch.testing.assert_close(paged_latent_attention(query, cache, sequences, SCALE, WIDTH), expected)
