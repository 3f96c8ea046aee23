"""The arithmetic of pages: from scores to gains, from shares to whole pages, from pages to tokens."""

from __future__ import annotations

import torch
from torch.nn.functional import pad


def page_gains(scores: torch.Tensor, page: int) -> torch.Tensor:
    """Return what a head's 1st, 2nd, ... page would hold if it took tokens by their scores: the sums of the
    next ``page`` of [..., tokens] in falling order, [..., pages] float64. They fall, too."""
    ordered = scores.double().sort(-1, descending=True).values
    return pad(ordered, (0, -scores.shape[-1] % page)).unflatten(-1, (-1, page)).sum(-1)


def largest_remainder(shares: torch.Tensor, total: int) -> torch.Tensor:
    """Round [n] float64 shares that add up to ``total`` to int64 that do, too, none by 1 or more. Among equal
    remainders the first are rounded up."""
    whole = torch.floor(shares + 1e-9)  # a number just below a whole one counts as that one
    rest = shares - whole
    missing = total - int(whole.sum())
    up = torch.sort(rest, descending=True, stable=True).indices[:missing]
    whole[up] += 1
    return whole.long()


def kept_tokens(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices, ascending, of the ``count`` tokens of [tokens] that score most, or of all of them
    (Ada-KV Algorithm 1). Of equal ones the first are kept."""
    order = torch.sort(scores, descending=True, stable=True).indices[:count]
    return order.sort().values
