"""The exact causal mask for scattered tokens: maximal runs of consecutive positions as pseudo-requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of consecutive positions. Each is a request whose last query is the last token of its sequence,
    so that a backend's bottom-right aligned causal mask is exact for it.

    query_start: [runs + 1] int32, where each run starts among the selected tokens.
    seq_lens: [runs] int32, last position + 1.
    """

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int

    @property
    def count(self) -> int:
        return self.seq_lens.numel()


def find_runs(positions: torch.Tensor) -> Runs:
    """Runs of ``positions``, [m] int64, strictly ascending, m > 0."""
    m = positions.numel()
    assert m > 0, "a forward over no tokens is skipped by the caller"
    breaks = torch.nonzero(positions[1:] != positions[:-1] + 1, as_tuple=True)[0] + 1
    edges = torch.cat([breaks.new_zeros(1), breaks, breaks.new_full((1,), m)])
    return Runs(
        query_start=edges.to(torch.int32),
        seq_lens=(positions[edges[1:] - 1] + 1).to(torch.int32),
        max_query_len=int((edges[1:] - edges[:-1]).max()),
    )


def whole_sequences(lengths: Sequence[int]) -> Runs:
    """Several sequences, one after the other, all of whose tokens are queries."""
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return Runs(starts.to(torch.int32), torch.tensor(lengths, dtype=torch.int32), max(lengths))


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Reference: float32 attention of scattered queries with the mask written out. For checks, not speed.

    query [m, heads, d] at ``positions`` [m]; key and value [n, kv_heads, d] at 0..n-1. Returns [m, heads, d].
    """
    group = query.shape[1] // key.shape[1]
    k = key.float().repeat_interleave(group, dim=1)
    v = value.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("mhd,nhd->hmn", query.float(), k) * scale
    allowed = torch.arange(key.shape[0], device=key.device)[None, :] <= positions[:, None]
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    return torch.einsum("hmn,nhd->mhd", weights, v)
