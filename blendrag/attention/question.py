"""How much attention a question pays to each cached token (ProphetKV, InfoFlow)."""

from __future__ import annotations

import torch

_SCORES_AT_ONCE = 1 << 22  # of one band, in float32: 16 MiB


def question_attention(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, scale: float, cached: torch.Tensor
) -> torch.Tensor:
    """One layer's softmax mass that the question puts on each cached token, summed over heads and rows.

    query: [m, heads, d] at ascending ``positions`` [m]; key: [n_total, kv_heads, d] at 0..n_total-1, both
    rotated. cached: [n] int64 positions. Returns [n] float32, zeros for m = 0. Computed in bands of rows.
    """
    kv_heads, group = key.shape[1], query.shape[1] // key.shape[1]
    mass = torch.zeros(key.shape[0], dtype=torch.float32, device=key.device)
    keys = key.permute(1, 2, 0).float()  # [kv_heads, d, n_total]
    rows = max(1, _SCORES_AT_ONCE // (query.shape[1] * max(1, key.shape[0])))
    for begin in range(0, positions.numel(), rows):
        at = positions[begin : begin + rows]
        first, end = int(at[0]) + 1, int(at[-1]) + 1
        band = (query[begin : begin + rows].float() * scale).unflatten(1, (kv_heads, group))
        scores = torch.matmul(band.permute(1, 2, 0, 3).flatten(1, 2), keys[:, :, :end])
        later = torch.arange(first, end, device=key.device)[None, :] > at[:, None]
        scores.unflatten(1, (group, -1))[..., first:].masked_fill_(later, float("-inf"))
        mass[:end] += scores.softmax(-1).sum((0, 1))
    return mass[cached]
