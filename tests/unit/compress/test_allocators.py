"""How many pages each head keeps."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendrag.compress import ALLOCATORS, SCORERS, check_budget, make_budget, page_gains
from blendrag.compress.pages import largest_remainder
from blendrag.compress.pyramid import layer_totals
from blendrag.errors import ConfigError
from blendrag.options import BlendOptions
from places import DATA

PAGES = [1, 16, 32]
NAMES = ["uniform", "ada", "pyramid", "ada_pyramid"]
ALPHAS = st.floats(0, 1)


@st.composite
def scored(draw: st.DrawFn) -> tuple[torch.Tensor, int, int]:
    """Scores of some layers, some of their tokens to be kept; a page's size; pages to share out."""
    page = draw(st.sampled_from(PAGES))
    layers, heads, most = draw(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 9)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    tokens = max(1, most * page - draw(st.integers(0, page - 1)))
    # Heads that differ in how much a few tokens have of all; quantised, so that there are equal ones.
    sharp = torch.exp(draw(st.floats(0, 3)) * torch.randn(layers, heads, 1, generator=generator))
    scores = (torch.randn(layers, heads, tokens, generator=generator) * sharp).softmax(-1)
    scores = torch.round(scores * 512) / 512
    pages = draw(st.integers(1, most))
    scores[..., tokens - draw(st.integers(0, min(tokens, pages * page))) :] = float("inf")
    return scores, page, pages


@given(st.sampled_from(NAMES), ALPHAS, scored())
def test_all_pages_are_given_out_and_none_is_missing_where_tokens_have_to_stay(
    name: str, alpha: float, case: tuple[torch.Tensor, int, int]
) -> None:
    scores, page, pages = case
    gains = page_gains(scores, page)
    found = ALLOCATORS[name](alpha).allocate(gains, pages)
    assert found.dtype == torch.int64 and found.shape == gains.shape[:2]
    assert int(found.sum()) == pages * found.numel(), "the total is exact"
    assert (found >= gains.isinf().sum(-1)).all() and (found <= gains.shape[2]).all()
    if name in ("uniform", "ada"):
        assert (found.sum(1) == pages * found.shape[1]).all()


def kept(gains: torch.Tensor, pages: torch.Tensor) -> float:
    cut = torch.arange(gains.shape[-1]) < pages[..., None]
    return float(gains[cut].sum())


@given(ALPHAS, scored())
def test_adaptive_budgets_keep_as_much_attention_as_uniform_ones_or_more(
    alpha: float, case: tuple[torch.Tensor, int, int]
) -> None:
    """Theorem 4, on pages, with and without the safeguard: what moves between heads always gains."""
    scores, page, pages = case
    gains = page_gains(scores.clamp_max(1.0), page)
    uniform = torch.full(gains.shape[:2], pages)
    found = ALLOCATORS["ada"](alpha).allocate(gains, pages)
    assert kept(gains, found) >= kept(gains, uniform) - 1e-9


@given(st.integers(0, 1000), st.integers(1, 3), st.integers(1, 4), st.sampled_from(PAGES))
def test_greedy_choice_is_the_best_one(seed: int, heads: int, most: int, page: int) -> None:
    scores = torch.rand(1, heads, most * page, generator=torch.Generator().manual_seed(seed)) ** 4
    gains = page_gains(scores, page)
    for pages in range(1, most + 1):
        found = ALLOCATORS["ada"](0.0).allocate(gains, pages)
        best = max(
            kept(gains, torch.tensor([counts]))
            for counts in product(range(most + 1), repeat=heads)
            if sum(counts) == pages * heads
        )
        assert kept(gains, found) == pytest.approx(best)


def test_alpha_one_is_uniform_and_alpha_zero_is_free() -> None:
    gains = page_gains(torch.tensor([[[9.0, 8, 7, 6], [1, 1, 1, 1]]]), 1)
    assert ALLOCATORS["ada"](1.0).allocate(gains, 2).tolist() == [[2, 2]]
    assert ALLOCATORS["ada"](0.0).allocate(gains, 2).tolist() == [[4, 0]]
    assert ALLOCATORS["ada"](0.5).allocate(gains, 2).tolist() == [[3, 1]]


def test_pyramid_falls_from_twice_the_mean_to_a_twentieth() -> None:
    gains = torch.zeros(30, 3, 400)
    totals = layer_totals(gains, 100)
    assert totals[0] == 3 * 195 and totals[-1] == 3 * 5
    assert (totals.diff() <= 0).all() and totals.sum() == 30 * 3 * 100
    uneven = ALLOCATORS["pyramid"](0.5).allocate(gains, 100)
    assert (uneven.max(1).values - uneven.min(1).values <= 1).all()


def test_pyramid_gives_its_first_layers_no_more_than_there_is() -> None:
    assert layer_totals(torch.zeros(4, 2, 11), 10).tolist() == [22, 21, 19, 18]


@given(st.lists(st.floats(0, 50), min_size=1, max_size=20))
def test_rounding_keeps_the_sum(shares: list[float]) -> None:
    total = round(sum(shares))
    exact = torch.tensor(shares, dtype=torch.float64) * (total / sum(shares) if sum(shares) else 0)
    found = largest_remainder(exact, total if sum(shares) else 0)
    assert int(found.sum()) == (total if sum(shares) else 0)
    assert ((found - exact).abs() < 1 + 1e-6).all()


@pytest.mark.parametrize("alpha", ["-0.1", "1.1", "nan", "half"])
def test_alpha_that_is_no_share_is_refused(alpha: str) -> None:
    with pytest.raises(ConfigError, match="alpha must be between 0 and 1, not "):
        make_budget(f"512:alpha={alpha}")


def test_budget_says_its_allocator_scorer_and_their_arguments_in_any_order() -> None:
    budget = make_budget("512:critical:alpha=0.2:uniform:window=16")
    assert (budget.tokens, budget.allocator.alpha, budget.scorer.window) == (512, 0.2, 16)
    kinds = type(budget.allocator), type(budget.scorer)
    assert kinds == (ALLOCATORS["uniform"], SCORERS["critical"])
    assert {type(each.allocator) for each in map(make_budget, (64, "64"))} == {ALLOCATORS["ada"]}
    usual = make_budget(64)
    assert (usual.tokens, usual.allocator.alpha, usual.scorer.window) == (64, 0.5, 32)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("512:adda", r"unknown allocator or scorer 'adda'; .*did you mean ada\?"),
        ("512:windo", r"unknown allocator or scorer 'windo'; .*did you mean window\?"),
        ("512:joint", "there are ada, ada_pyramid, pyramid, uniform, critical, window"),
        ("512:ada:uniform", "ada and uniform are two of a kind"),
        ("512:alfa=0.2", r"unknown argument 'alfa'; there are alpha, window; did you mean alpha\?"),
        ("512:window=0", "window must be a whole number, at least 1, not '0'"),
        ("512:window=8:window=9", "says window twice"),
    ],
)
def test_wrong_word_in_a_budget_is_named_with_those_that_there_are(written: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_budget(written)
    assert set(ALLOCATORS) == set(NAMES)


@pytest.mark.skipif(not (DATA / "adakv").exists(), reason="no reference tensors in shared/data/adakv")
@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5])
def test_budgets_are_those_of_the_authors_code(alpha: float) -> None:
    """30 layers of a real prompt, 160 tokens a head of which 32 are the window."""
    with np.load(DATA / "adakv" / "smol512_w32_k7_cap160.npz") as file:
        known = {name: torch.from_numpy(file[name]) for name in file.files}
    for layer in range(30):
        gains = page_gains(known[f"score_L{layer}"], 1)
        theirs = known[f"repo_headlens_L{layer}_a{alpha}"] - 32
        adaptive = ALLOCATORS["ada"](0.0).allocate(gains, 128)[0]
        rounded = torch.round(adaptive * (1 - alpha) + int(128 * alpha))  # theirs, whose sum is not kept
        assert rounded.tolist() == theirs.tolist()
        ours = ALLOCATORS["ada"](alpha).allocate(gains, 128)[0]
        assert (ours - theirs).abs().max() <= 1, "only rounding is ours"
        if not alpha:
            assert ours.tolist() == (known[f"kvpress_kept_L{layer}_a0.0"] - 32).tolist()


def test_budget_that_leaves_no_choice_is_refused() -> None:
    for block, window, least in ((1, 32, 33), (16, 32, 48), (32, 32, 64), (32, 33, 96), (128, 32, 256)):
        check_budget(BlendOptions(kv_budget=f"{least}:window={window}"), block)
        with pytest.raises(ConfigError, match=f"kv_budget must be at least {least}, the window"):
            check_budget(BlendOptions(kv_budget=f"{least - 1}:window={window}"), block)
    check_budget(BlendOptions(kv_budget=1))  # the engine's blocks are not known yet
