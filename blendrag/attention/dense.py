"""The exact causal mask for scattered tokens, written out: a CPU's other way (design decision D7)."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from blendrag.attention.scores import Scores

_BANDS = 4


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    scores: Scores,
) -> torch.Tensor:
    """Attention of scattered queries, [m, heads, d] at ascending ``positions``, over keys 0..n-1.

    key and value: [n, kv_heads, d]. scores: bare ones. Returns [m, heads, d]. Computed in bands of queries,
    each over the keys up to its last position, so that about half of what lies behind the mask is never
    touched.
    """
    assert scores.bare, "no cap and no sinks: torch's kernels know neither"
    out = torch.empty_like(query)
    keys, values = (t.transpose(0, 1)[None] for t in (key, value))
    for band in torch.arange(positions.numel(), device=positions.device).chunk(_BANDS):
        rows = slice(int(band[0]), int(band[-1]) + 1)
        end = int(positions[rows][-1]) + 1
        mask = scores.in_sight(positions[rows], torch.arange(end, device=positions.device))
        part = scaled_dot_product_attention(
            query[rows].transpose(0, 1)[None],
            keys[:, :, :end],
            values[:, :, :end],
            attn_mask=mask,
            scale=scores.scale,
            enable_gqa=True,
        )
        out[rows] = part[0].transpose(0, 1)
    return out
