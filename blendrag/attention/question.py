"""The attention that a question pays to each cached token (ProphetKV, InfoFlow)."""

from __future__ import annotations

import torch

from blendrag.attention.scores import Scores

# Scores of one band, in float32: 16 MiB, and 128 on other devices, where launches take longer than bytes.
_SCORES_AT_ONCE = 1 << 22
_SCORES_ON_DEVICE = 1 << 25


def question_attention(
    query: torch.Tensor,
    positions: torch.Tensor,
    cached_key: torch.Tensor,
    cached: torch.Tensor,
    fresh_key: torch.Tensor,
    fresh: torch.Tensor,
    scores: Scores,
) -> torch.Tensor:
    """Return one layer's softmax mass on each cached token, summed over heads and the question's rows.

    query: [m, heads, d] at ascending ``positions`` [m], all of them behind what is cached. cached_key:
    [n, kv_heads, d] at ``cached`` [n]; fresh_key: [f, kv_heads, d] at ``fresh`` [f], the question's own among
    them; all rotated. Returns [n] float32, zeros for m = 0. Computed in bands of rows, in the type of the
    keys but for what follows the products.
    """
    kv_heads, group = cached_key.shape[1], query.shape[1] // cached_key.shape[1]
    n = cached_key.shape[0]
    mass = torch.zeros(n, dtype=torch.float32, device=cached_key.device)
    old, new = cached_key.permute(1, 2, 0), fresh_key.permute(1, 2, 0)  # [kv_heads, d, n], [kv_heads, d, f]
    keys = torch.cat([cached, fresh])
    masked = n if scores.window is None else 0  # only windows hide cached tokens
    most = _SCORES_AT_ONCE if query.device.type == "cpu" else _SCORES_ON_DEVICE
    rows = max(1, most // (query.shape[1] * (keys.numel() + 1)))
    for begin in range(0, positions.numel(), rows):
        at = positions[begin : begin + rows]
        band = (query[begin : begin + rows] * scores.scale).unflatten(1, (kv_heads, group))
        band = band.permute(1, 2, 0, 3).flatten(1, 2)  # [kv_heads, group * rows, d]
        products = torch.cat([torch.matmul(band, old), torch.matmul(band, new)], dim=-1).float()
        products = products.unflatten(1, (group, -1))
        if scores.soft_cap:
            products = scores.soft_cap * torch.tanh(products / scores.soft_cap)
        products[..., masked:].masked_fill_(~scores.in_sight(at, keys[masked:]), float("-inf"))
        if scores.sinks is not None:
            sinks = scores.sinks.float().view(kv_heads, group, 1, 1).expand(-1, -1, at.numel(), 1)
            products = torch.cat([products, sinks], dim=-1)
        mass += products.softmax(-1).sum((0, 1, 2))[:n]
    return mass
