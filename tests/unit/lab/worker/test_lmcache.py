from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from as_requests import as_requests
from blendrag.attention.runs import dense_attention, find_runs
from blendrag.attention.scores import Scores
from blendrag.lab.worker.lmcache import bottom_right


@given(st.sets(st.integers(0, 80), min_size=1, max_size=60).map(sorted), st.integers(0, 9))
def test_bottom_right_mask_leaks_exactly_where_the_selected_are_scattered(
    positions: list[int], after: int
) -> None:
    """Why the mask of the released code is for comparison with it only."""
    m, n = len(positions), positions[-1] + 1 + after
    query, key, one_hot = torch.ones(m, 1, 4), torch.ones(n, 1, 4), torch.eye(n)[:, None]
    at = torch.tensor(positions)
    exact = dense_attention(query, key, one_hot, at, Scores(0.5))[:, 0]  # [m, n]: the weight of every key
    both = at.numpy(), bottom_right(at.numpy(), np.ones(m, bool), n)
    found = [find_runs(seen, np.zeros_like(seen)) for seen in both]
    runs, leaky = (as_requests(each, query, key, one_hot, 0.5)[:, 0] for each in found)
    future = torch.arange(n)[None, :] > at[:, None]
    assert not exact[future].any() and not runs[future].any()
    assert bool(leaky[future].any()) == (positions != list(range(n - m, n)))


def test_bottom_right_mask_leaks_for_tokens_that_were_not_selected() -> None:
    positions = np.array([0, 1, 4, 6, 9, 10])
    selected = np.array([False, False, True, True, False, False])
    assert bottom_right(positions, selected, end=9).tolist() == [0, 1, 7, 8, 9, 10]
    assert positions.tolist() == [0, 1, 4, 6, 9, 10], "its input was changed"
