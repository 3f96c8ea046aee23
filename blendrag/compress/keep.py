"""From scores to what a page gains, and from pages to tokens."""

from __future__ import annotations

import torch
from torch.nn.functional import pad


def page_gains(scores: torch.Tensor, page: int) -> torch.Tensor:
    """What a head's 1st, 2nd, ... page would hold if it took tokens by their scores: the sums of the next
    ``page`` of [..., tokens] in falling order, [..., pages] float64. They fall, too."""
    ordered = scores.double().sort(-1, descending=True).values
    return pad(ordered, (0, -scores.shape[-1] % page)).unflatten(-1, (-1, page)).sum(-1)


def kept_tokens(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the ``count`` tokens of [tokens] that score most, or of all of them; ascending (Ada-KV
    Algorithm 1). Of equal ones the first are kept."""
    order = torch.sort(scores, descending=True, stable=True).indices[:count]
    return order.sort().values
