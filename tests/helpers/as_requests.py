"""Attention of runs as an engine's backend computes it, row by row."""

from __future__ import annotations

import torch

from blendrag.attention.runs import Runs


def as_requests(
    runs: Runs, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Each run as a backend computes it: the last queries of a causal request over the first keys."""
    out = query.new_empty(*query.shape[:2], value.shape[-1])
    edges = runs.query_start.tolist()
    group = query.shape[1] // key.shape[1]
    for run, length in enumerate(runs.seq_lens.tolist()):
        for row in range(edges[run], edges[run + 1]):
            sees = length - (edges[run + 1] - 1 - row)  # bottom-right aligned
            for head in range(query.shape[1]):
                weights = torch.softmax(key[:sees, head // group] @ query[row, head] * scale, dim=0)
                out[row, head] = weights @ value[:sees, head // group]
    return out
