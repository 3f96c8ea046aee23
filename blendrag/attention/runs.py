"""The exact causal mask for scattered tokens: maximal runs of consecutive positions as pseudo-requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from blendrag.attention.scores import Scores


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of consecutive positions. Each is a request whose last query is the last token of its sequence,
    so that a backend's bottom-right aligned causal mask is exact for it. On the host.

    query_start: [runs + 1] int32, where each run starts among the selected tokens.
    seq_lens: [runs] int32, last position + 1.
    sequences: [runs] int64, the sequence that each is in.
    """

    query_start: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    sequences: npt.NDArray[np.int64]
    max_query_len: int

    @property
    def count(self) -> int:
        return len(self.seq_lens)


def find_runs(positions: npt.NDArray[np.int64], sequences: npt.NDArray[np.int64]) -> Runs:
    """Return the runs of ``positions``, [m], m > 0, each in its one of ``sequences``, [m]."""
    apart = (positions[1:] != positions[:-1] + 1) | (sequences[1:] != sequences[:-1])
    edges = np.concatenate([[0], np.flatnonzero(apart) + 1, [len(positions)]])
    return Runs(
        query_start=edges.astype(np.int32),
        seq_lens=(positions[edges[1:] - 1] + 1).astype(np.int32),
        sequences=sequences[edges[:-1]],
        max_query_len=int(np.diff(edges).max()),
    )


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    scores: Scores,
) -> torch.Tensor:
    """Return the reference: float32 attention of scattered queries with the mask written out. For checks, not
    speed.

    query: [m, heads, d] at ``positions`` [m]. key, value: [n, kv_heads, d] at 0..n-1. Returns [m, heads, d].
    """
    group = query.shape[1] // key.shape[1]
    k = key.float().repeat_interleave(group, dim=1)
    v = value.float().repeat_interleave(group, dim=1)
    logits = torch.einsum("mhd,nhd->hmn", query.float(), k) * scores.scale
    if scores.soft_cap:
        logits = scores.soft_cap * torch.tanh(logits / scores.soft_cap)
    seen = scores.in_sight(positions, torch.arange(key.shape[0], device=key.device))
    logits = logits.masked_fill(~seen, float("-inf"))
    if scores.sinks is not None:
        sinks = scores.sinks.float()[:, None, None].expand(-1, logits.shape[1], 1)
        logits = torch.cat([logits, sinks], -1)
    weights = logits.softmax(-1)[..., : key.shape[0]]
    return torch.einsum("hmn,nhd->mhd", weights, v)
