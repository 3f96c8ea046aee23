"""The scorers by what the observation window attends to."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.nn.functional import max_pool1d

from blendrag.compress.scorer import Observed, Scorer, register_scorer


@register_scorer("window")
class WindowAttention(Scorer):
    """The scorer SnapKV: the attention of the window's queries, mean over them and over the heads that share
    a KV head, then the maximum over a token and its neighbours (Ada-KV section 3.4, Algorithm 3)."""

    pool: ClassVar[int] = 7

    def score(self, layer: Observed) -> torch.Tensor:
        observed = observed_attention(layer)
        return max_pool1d(observed[None], self.pool, stride=1, padding=self.pool // 2)[0]


@register_scorer("critical")
class Critical(WindowAttention):
    """The scorer CriticalKV: the window's attention times the norm of what a token adds to the layer's
    output, by all heads that share a KV head. It is the L2 norm: the L1 norm takes group * hidden / d times
    as long and hardly ranks differently, as the numbers of V W_O are many and of similar size."""

    reads_values = True

    def score(self, layer: Observed) -> torch.Tensor:
        assert layer.value is not None and layer.gram is not None, "a scorer that reads them is given them"
        return super().score(layer) * projected_norms(layer.value[: layer.candidates], layer.gram)


def observed_attention(layer: Observed) -> torch.Tensor:
    """Return the softmax of the window's queries over the tokens before it, mean over queries and group:
    [kv_heads, candidates] float32. The window's own tokens take their share. One KV head at a time."""
    window, kv_heads = layer.query.shape[0], layer.key.shape[1]
    later = torch.ones(window, window, dtype=torch.bool, device=layer.key.device).triu(1)
    query = layer.query.unflatten(1, (kv_heads, -1))  # [window, kv_heads, group, d]
    observed = []
    for head in range(kv_heads):
        rows = query[:, head].transpose(0, 1).flatten(0, 1)  # [group * window, d]
        products = (rows @ layer.key[:, head].T).float().mul_(layer.scale).unflatten(0, (-1, window))
        products[..., layer.candidates :].masked_fill_(later, float("-inf"))
        observed.append(products.softmax(-1)[..., : layer.candidates].mean((0, 1)))
    return torch.stack(observed)


def gram_of(output: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
    """Return ``Observed.gram`` for the weight of the output projection, [hidden, heads * d]."""
    parts = output.float().unflatten(1, (kv_heads, heads // kv_heads, -1))
    return torch.einsum("okgd,okge->kde", parts, parts)


def projected_norms(value: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """Return L2 norms of the rows of V W_O, over the heads that share a KV head: [kv_heads, n] float32, from
    ``value``, [n, kv_heads, d], and ``Observed.gram``."""
    rows = value.float().transpose(0, 1)
    return ((rows @ gram) * rows).sum(-1).clamp_min(0).sqrt()
