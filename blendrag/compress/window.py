"""Scores by what the observation window attends to."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.nn.functional import max_pool1d

from blendrag.compress.scorer import Observed, Scorer, register_scorer


@register_scorer("window")
class WindowAttention(Scorer):
    """SnapKV: the attention of the window's queries, mean over them and over the heads that share a KV head,
    then the maximum over a token and its neighbours (Ada-KV section 3.4, Algorithm 3)."""

    pool: ClassVar[int] = 7

    def score(self, layer: Observed) -> torch.Tensor:
        observed = observed_attention(layer)
        return max_pool1d(observed[None], self.pool, stride=1, padding=self.pool // 2)[0]


@register_scorer("critical")
class Critical(WindowAttention):
    """CriticalKV: the window's attention times the L1 norm of what a token adds to the layer's output, the
    mean over the heads that share a KV head."""

    reads_values = True

    def score(self, layer: Observed) -> torch.Tensor:
        assert layer.value is not None and layer.output is not None, "a scorer that reads them is given them"
        norms = projected_norms(layer.value[: layer.candidates], layer.output)
        return super().score(layer) * norms.unflatten(0, (layer.key.shape[1], -1)).mean(1)


def observed_attention(layer: Observed) -> torch.Tensor:
    """The softmax of the window's queries over the tokens before it, mean over queries and group:
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


def projected_norms(value: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """L1 norms of the rows of each query head's V W_O: [heads, n] float32, of [n, kv_heads, d] and
    [hidden, heads * d]. One head at a time."""
    d = value.shape[2]
    heads = output.shape[1] // d
    group = heads // value.shape[1]
    parts = output.float().split(d, dim=1)
    return torch.stack([(value[:, h // group].float() @ parts[h].T).abs().sum(-1) for h in range(heads)])
