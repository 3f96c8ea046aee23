"""KV deviation: how far a stored token is from what full prefill gives (CacheBlend section 4.1)."""

from __future__ import annotations

import torch

from blendrag.options import Metric


def squared_deviation(fresh: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Squared L2 distance per token. Both [n, kv_heads, head_size]; returns [n] float32.

    K may be compared before RoPE: rotation keeps lengths.
    """
    return (fresh.float() - stored.float()).square_().flatten(1).sum(1)


def squared_norm(kv: torch.Tensor) -> float:
    """Mean squared L2 norm of [n, kv_heads, head_size], the unit thresholds are given in."""
    return float(kv.float().square().flatten(1).sum(1).mean()) if kv.shape[0] else 1.0


def deviation(
    metric: Metric,
    fresh_k: torch.Tensor,
    fresh_v: torch.Tensor,
    stored_k: torch.Tensor,
    stored_v: torch.Tensor,
) -> tuple[torch.Tensor, float]:
    """Deviation per token and its unit, by V, K, or the sum of both, each [n, kv_heads, head_size]."""
    if metric == "v":
        return squared_deviation(fresh_v, stored_v), squared_norm(fresh_v)
    if metric == "k":
        return squared_deviation(fresh_k, stored_k), squared_norm(fresh_k)
    both = squared_deviation(fresh_k, stored_k) + squared_deviation(fresh_v, stored_v)
    return both, squared_norm(fresh_k) + squared_norm(fresh_v)
