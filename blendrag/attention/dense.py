"""The exact causal mask for scattered tokens, written out: a CPU's other way (design decision D7)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from blendrag.attention.scores import Scores

_BANDS = 4


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: npt.NDArray[np.int64],
    scores: Scores,
) -> torch.Tensor:
    """Attention of scattered queries, [m, heads, d] at ascending ``positions``, over keys 0..n-1.

    key and value: [n, kv_heads, d], on a CPU. scores: bare ones. Returns [m, heads, d]. Computed in bands of
    queries, each over the keys up to its last position, so that about half of what lies behind the mask is
    never touched.
    """
    assert scores.bare, "no cap and no sinks: torch's kernels know neither"
    out = torch.empty_like(query)
    keys, values = (t.transpose(0, 1)[None] for t in (key, value))
    size = -(-len(positions) // _BANDS)
    for begin in range(0, len(positions), size):
        rows = slice(begin, begin + size)
        at = positions[rows]
        end = int(at[-1]) + 1
        mask = scores.in_sight(torch.from_numpy(at), torch.arange(end))
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
