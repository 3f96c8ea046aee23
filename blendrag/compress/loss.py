"""What eviction costs a layer: Ada-KV's L1 loss and its bound (section 3.2)."""

from __future__ import annotations

import torch


def eviction_loss(
    weights: torch.Tensor, value: torch.Tensor, output: torch.Tensor, kept: torch.Tensor
) -> torch.Tensor:
    """L1 distance of a layer's attention output before and after eviction, [queries] float32 (Theorem 1).

    weights: [queries, heads, n], softmax over all tokens. value: [n, kv_heads, d]. output: [hidden,
    heads * d], the output projection. kept: [kv_heads, n] bool, some of each head.
    """
    group = weights.shape[1] // value.shape[1]
    left = weights * kept.repeat_interleave(group, 0)
    lost = weights - left / left.sum(-1, keepdim=True)
    mixed = torch.einsum("qhn,nhd->qhd", lost.float(), value.float().repeat_interleave(group, 1))
    return (mixed.flatten(1) @ output.float().T).abs().sum(-1)


def loss_bound(
    weights: torch.Tensor, value: torch.Tensor, output: torch.Tensor, kept: torch.Tensor
) -> torch.Tensor:
    """What the loss of the same arguments cannot exceed, [queries]: 2 C times the attention that is evicted
    (Theorem 2), C being the largest norm of a row of V W_O."""
    group = weights.shape[1] // value.shape[1]
    evicted = (weights * ~kept.repeat_interleave(group, 0)).sum((1, 2))
    return 2 * projected_norms(value, output).max() * evicted


def projected_norms(value: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """L1 norms of the rows of each query head's V W_O: [heads, n] float32, of [n, kv_heads, d] and
    [hidden, heads * d]. One head at a time."""
    d = value.shape[2]
    heads = output.shape[1] // d
    group = heads // value.shape[1]
    parts = output.float().split(d, dim=1)
    return torch.stack([(value[:, h // group].float() @ parts[h].T).abs().sum(-1) for h in range(heads)])
