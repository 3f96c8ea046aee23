"""From shares to whole pages."""

from __future__ import annotations

import torch


def largest_remainder(shares: torch.Tensor, total: int) -> torch.Tensor:
    """[n] float64 shares that add up to ``total``, rounded to int64 that do, none by 1 or more; among equal
    remainders the first go up."""
    whole = torch.floor(shares + 1e-9)  # a bit below a whole number is that number
    rest = shares - whole
    missing = total - int(whole.sum())
    up = torch.sort(rest, descending=True, stable=True).indices[:missing]
    whole[up] += 1
    return whole.long()
