"""Attention of scattered rows over latent KV (MLA): one head that all queries share.

Of plain matrix products, on any device: all heads of a row read the same keys, so that the products are as
large as those of a prompt's projections.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

# Scores of one band, in float32: 16 MiB, and 256 on other devices, where launches take longer than bytes.
_SCORES_AT_ONCE = 1 << 22
_SCORES_ON_DEVICE = 1 << 26


class LatentRows(NamedTuple):
    """The rows that attend to one sequence. rows: [m], which of all; positions: [m], up to which each sees;
    blocks, places: [n], where the sequence's tokens are in a paged cache."""

    rows: torch.Tensor
    positions: torch.Tensor
    blocks: torch.Tensor
    places: torch.Tensor


def paged_latent_attention(
    query: torch.Tensor, cache: torch.Tensor, sequences: Sequence[LatentRows], scale: float, width: int
) -> torch.Tensor:
    """Return the attention of ``query``, [m, heads, d], over a paged cache, [blocks, block_size, d], in which
    the first ``width`` numbers of K are V; [m, heads, width]."""
    out = query.new_empty(*query.shape[:2], width)
    for rows, positions, blocks, places in sequences:
        out[rows] = latent_attention(query[rows], cache[blocks, places], positions, scale, width)
    return out


def latent_attention(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, scale: float, width: int
) -> torch.Tensor:
    """Return the attention of ``query``, [m, heads, d] at ``positions`` [m], over ``key``, [n, d] at 0..n-1;
    [m, heads, width]. Computed in bands of rows."""
    heads = query.shape[1]
    at = torch.arange(len(key), device=key.device)
    out = query.new_empty(*query.shape[:2], width)
    most = _SCORES_AT_ONCE if key.device.type == "cpu" else _SCORES_ON_DEVICE
    rows = max(1, most // (heads * max(1, len(key))))
    for begin in range(0, len(query), rows):
        band = slice(begin, begin + rows)
        products = _product(query[band].flatten(0, 1), key.T).mul_(scale).view(-1, heads, len(key))
        products.masked_fill_(at > positions[band, None, None], float("-inf"))
        weights = products.softmax(-1).to(key.dtype).flatten(0, 1)
        out[band] = _product(weights, key[:, :width]).view(-1, heads, width)
    return out


def _product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a matrix product in float32, of sums that no device rounds before they are complete."""
    if one.device.type == "cpu":
        return one.float() @ other.float()
    return torch.mm(one, other, out_dtype=torch.float32)
