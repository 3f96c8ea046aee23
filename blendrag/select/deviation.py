"""KV deviation: how far a stored token is from what full prefill gives (CacheBlend section 4.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from blendrag.select.interface import Metric


def squared_deviation(fresh: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Return the squared L2 distance per token, [n] float32. Both are [n, kv_heads, head_size].

    K may be compared before RoPE: rotation keeps lengths.
    """
    return (fresh.float() - stored.float()).square_().flatten(1).sum(1)


def squared_norm(kv: torch.Tensor) -> torch.Tensor:
    """Return the mean squared L2 norm of [n, kv_heads, head_size], the unit of thresholds; 1 of nothing."""
    if not kv.shape[0]:
        return kv.new_ones((), dtype=torch.float32)
    return kv.float().square().flatten(1).sum(1).mean()


def deviation(
    metric: Metric,
    fresh: Sequence[torch.Tensor],
    stored: Sequence[torch.Tensor],
    total: Callable[[torch.Tensor], torch.Tensor] = lambda own: own,
) -> tuple[torch.Tensor, float]:
    """Return the deviation per token and its unit, by V, K, or the sum of both. fresh, stored: K and V, each
    [n, kv_heads, head_size].

    Both come back to the host, in one copy, as that waits for whatever the device has to do. ``total``: sums
    what several processes find, each of which has some of the heads.
    """
    pairs = [(new, old) for part, new, old in zip("kv", fresh, stored, strict=True) if part in metric]
    scores = torch.stack([squared_deviation(*pair) for pair in pairs]).sum(0)
    norms = torch.stack([squared_norm(own) for own, _ in pairs])
    both = total(torch.cat([scores, norms])).cpu()
    return both[: len(scores)], sum(both[len(scores) :].tolist())
