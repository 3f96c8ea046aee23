"""The cached tokens of a request, as selectors are given them."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from blendrag.select import CachedTokens

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=5)  # of a request's chunks


def tokens_of(lengths: list[int], seed: int = 0) -> CachedTokens:
    """Of chunks of these lengths, with some deviation (below ``norm``) and attention."""
    total = sum(lengths)
    generator = torch.Generator().manual_seed(seed)
    return CachedTokens(
        torch.cat([torch.arange(n) for n in lengths]),
        torch.cat([torch.full((n,), n) for n in lengths]),
        total,
        torch.rand(total, generator=generator),
        norm=2.0,
        attention=torch.rand(total, generator=generator),
    )
