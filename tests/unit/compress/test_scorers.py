"""What a token's KV is worth to a head."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from blendrag.attention.runs import dense_attention
from blendrag.attention.scores import Scores
from blendrag.compress import ALLOCATORS, SCORERS, Observed, kept_tokens, page_gains
from blendrag.compress.window import WindowAttention, gram_of, observed_attention
from places import DATA

NAMES = ["window", "critical"]
N, WINDOW, KV_HEADS, GROUP, SIZE = 60, 8, 2, 3, 16
OUTPUT = torch.randn(24, KV_HEADS * GROUP * SIZE, generator=torch.Generator().manual_seed(1))


def layer(seed: int = 0) -> Observed:
    torch.manual_seed(seed)
    key, value = torch.randn(2, N, KV_HEADS, SIZE)
    query, gram = torch.randn(WINDOW, KV_HEADS * GROUP, SIZE), gram_of(OUTPUT, KV_HEADS * GROUP, KV_HEADS)
    return Observed(query, key, SIZE**-0.5, value, gram)


def by_attention(case: Observed) -> torch.Tensor:
    """The same by reading attention out with values that are one-hot: [window, heads, N]."""
    positions = torch.arange(N - WINDOW, N)
    one_hot = torch.eye(N)[:, None].expand(-1, KV_HEADS, -1)
    return dense_attention(case.query, case.key, one_hot, positions, Scores(case.scale))


@pytest.mark.parametrize("name", NAMES)
def test_scores_have_their_shape_and_are_the_same_at_every_call(name: str) -> None:
    scores = SCORERS[name]().score(layer())
    assert scores.shape == (KV_HEADS, N - WINDOW) and scores.dtype == torch.float32
    assert (scores >= 0).all()
    assert scores.equal(SCORERS[name]().score(layer()))


def test_window_attends_to_what_lies_before_it_and_takes_the_whole_group() -> None:
    case = layer()
    expected = by_attention(case).mean(0).unflatten(0, (KV_HEADS, GROUP)).mean(1)[:, : N - WINDOW]
    torch.testing.assert_close(observed_attention(case), expected)
    pooled = torch.stack([expected[:, max(0, t - 3) : t + 4].amax(1) for t in range(N - WINDOW)], 1)
    torch.testing.assert_close(SCORERS["window"]().score(case), pooled)


def test_critical_tokens_are_those_that_change_the_output() -> None:
    case = layer()
    assert case.value is not None and SCORERS["critical"].reads_values
    plain, critical = SCORERS["window"]().score(case), SCORERS["critical"]().score(case)
    for head in range(KV_HEADS):
        parts = [OUTPUT[:, h * SIZE : (h + 1) * SIZE] for h in range(head * GROUP, (head + 1) * GROUP)]
        norms = torch.cat([case.value[:, head] @ part.T for part in parts], 1).norm(dim=1)
        torch.testing.assert_close(critical[head], plain[head] * norms[: N - WINDOW])


def test_kept_tokens_are_the_best_in_order() -> None:
    scores = torch.tensor([0.1, 0.5, 0.5, 0.9, 0.5])
    assert kept_tokens(scores, 3).tolist() == [1, 2, 3]
    assert kept_tokens(scores, 9).tolist() == [0, 1, 2, 3, 4]
    assert kept_tokens(scores, 0).tolist() == []


def test_page_gains_are_sums_of_the_next_best() -> None:
    assert page_gains(torch.tensor([3.0, 9.0, 1.0, 5.0, 2.0]), 2).tolist() == [14.0, 5.0, 1.0]


def test_scorers_are_the_two_that_have_a_number() -> None:
    assert set(SCORERS) == set(NAMES)


@pytest.mark.skipif(not (DATA / "adakv").exists(), reason="no reference tensors in shared/data/adakv")
def test_scores_and_kept_tokens_are_those_of_the_authors_code() -> None:
    """Two KV heads, four query heads, 40 tokens, window 4, pool 3, 12 tokens a head."""
    with np.load(DATA / "adakv" / "tiny_h2_n40.npz") as file:
        known = {name: torch.from_numpy(file[name]) for name in file.files}
    query, key = (known[name][0].transpose(0, 1) for name in "qk")

    class Narrow(WindowAttention):
        pool = 3

    scores = Narrow().score(Observed(query[-4:], key, key.shape[2] ** -0.5))
    torch.testing.assert_close(scores, known["score"][0], rtol=1e-4, atol=1e-6)
    counts = ALLOCATORS["ada"](0.0).allocate(page_gains(scores, 1)[None], 8)[0]
    assert (counts + 4).tolist() == known["headlens_a0.0"].tolist()
    begin = 0
    for head, count in enumerate(counts.tolist()):
        theirs = known["flatk_a0.0"][begin : begin + count + 4]
        tokens = (theirs[:, None] == key[:, head]).all(-1).int().argmax(1)  # by their K, the window last
        assert tokens[-4:].tolist() == [36, 37, 38, 39]
        # Pooling makes equal scores, of which they keep others.
        ours = scores[head, kept_tokens(scores[head], count)]
        torch.testing.assert_close(scores[head, tokens[:-4]].sort().values, ours.sort().values)
        begin += count + 4
