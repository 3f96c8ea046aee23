"""How much attention a question pays to each cached token (ProphetKV, InfoFlow)."""

from __future__ import annotations

import torch

_SCORES_AT_ONCE = 1 << 22  # of one band, in float32: 16 MiB


def question_attention(
    query: torch.Tensor,
    positions: torch.Tensor,
    cached_key: torch.Tensor,
    fresh_key: torch.Tensor,
    fresh: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """One layer's softmax mass that the question puts on each cached token, summed over heads and rows.

    query: [m, heads, d] at ascending ``positions`` [m], all of them behind what is cached. cached_key:
    [n, kv_heads, d]; fresh_key: [f, kv_heads, d] at ``fresh`` [f], the question's own among them; all
    rotated. Returns [n] float32, zeros for m = 0. Computed in bands of rows, in the type of the keys but for
    the softmax.
    """
    kv_heads, group = cached_key.shape[1], query.shape[1] // cached_key.shape[1]
    n = cached_key.shape[0]
    mass = torch.zeros(n, dtype=torch.float32, device=cached_key.device)
    old, new = cached_key.permute(1, 2, 0), fresh_key.permute(1, 2, 0)  # [kv_heads, d, n], [kv_heads, d, f]
    rows = max(1, _SCORES_AT_ONCE // (query.shape[1] * (n + fresh_key.shape[0])))
    for begin in range(0, positions.numel(), rows):
        at = positions[begin : begin + rows]
        band = (query[begin : begin + rows] * scale).unflatten(1, (kv_heads, group))
        band = band.permute(1, 2, 0, 3).flatten(1, 2)  # [kv_heads, group * rows, d]
        behind = torch.matmul(band, new).unflatten(1, (group, -1))
        behind.masked_fill_(fresh[None, :] > at[:, None], float("-inf"))
        scores = torch.cat([torch.matmul(band, old), behind.flatten(1, 2)], dim=-1).float()
        mass += scores.softmax(-1).sum((0, 1))[:n]
    return mass
