from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendrag.errors import ConfigError
from blendrag.options import BlendOptions
from blendrag.select import SELECTORS, CachedTokens, Selector, make_selector
from blendrag.select.interface import RankedSelector, budget
from cached_tokens import LAYERS, LENGTHS, tokens_of

STATIC = ["first_k", "query", "random"]
GRADUAL = ["gradual", "gradual_query", "weighted"]
RANKED = ["hkvd", *STATIC, *GRADUAL]
PAIRS = ["+".join(pair) for pair in permutations(RANKED, 2)]
CONSTANT = ["+".join(pair) for pair in permutations(["hkvd", *STATIC], 2)]


def run(selector: Selector, tokens: CachedTokens, layers: int = LAYERS) -> dict[int, list[int]]:
    """Which of the request's tokens are left after each check layer, as a fused prefill asks."""
    alive, left = torch.arange(tokens.total), {}
    for layer in selector.check_layers(layers):
        now = tokens.at(alive)
        found = selector.select(layer, CachedTokens(
            now.offsets, now.lengths, tokens.total,
            # another layer's deviation resembles the last one's and is not equal to it
            None if layer == 0 or now.deviation is None else now.deviation + 0.1 * torch.rand(
                alive.numel(), generator=torch.Generator().manual_seed(layer)),
            attention=now.attention, layer=layer,
        ))  # fmt: skip
        assert found.tolist() == sorted(set(found.tolist())), "ascending, none twice"
        alive = alive[found]
        left[layer] = alive.tolist()
    return left


@given(st.sampled_from(PAIRS), st.floats(0.001, 0.999), LENGTHS, st.integers(0, 9))
def test_union_takes_neither_more_nor_less_than_the_budget(
    name: str, ratio: float, lengths: list[int], seed: int
) -> None:
    tokens = tokens_of(lengths, seed)
    left = run(make_selector(BlendOptions(ratio, selector=name)), tokens)
    if name in CONSTANT:
        assert [len(alive) for alive in left.values()] == [budget(tokens.total, ratio)]
    counts = [len(alive) for alive in left.values()]
    assert counts == sorted(counts, reverse=True) and counts[-1] > 0


@given(st.sampled_from(STATIC), st.sampled_from(GRADUAL), st.booleans(), st.floats(0.05, 0.95))
def test_union_with_gradual_keeps_the_ratio_on_average(
    one: str, other: str, turned: bool, ratio: float
) -> None:
    tokens, name = tokens_of([900, 900]), f"{other}+{one}" if turned else f"{one}+{other}"
    left = run(make_selector(BlendOptions(ratio, selector=name)), tokens)
    begins = [*left, LAYERS]
    spent = sum(len(left[at]) * (end - at) for at, end in zip(left, begins[1:], strict=True))
    assert spent / (LAYERS - begins[0]) / tokens.total == pytest.approx(ratio, abs=2e-3)


@given(st.sampled_from(CONSTANT), st.floats(0.01, 0.99), LENGTHS)
def test_first_is_not_denied_its_half_nor_given_more(name: str, ratio: float, lengths: list[int]) -> None:
    tokens = tokens_of(lengths)
    selector = make_selector(BlendOptions(ratio, check_layers=(1,), selector=name))
    begin = selector.check_layers(LAYERS)[0]
    found = set(selector.select(begin, tokens).tolist())
    first, second = (SELECTORS[part](BlendOptions(ratio)) for part in name.split("+"))
    assert isinstance(first, RankedSelector) and isinstance(second, RankedSelector)
    half = first.best(tokens, budget(tokens.total, ratio / 2)).tolist()
    assert set(half) <= found
    rest = torch.tensor([at for at in range(tokens.total) if at not in half], dtype=torch.int64)
    expected = rest[second.best(tokens.at(rest), budget(tokens.total, ratio) - len(half))]
    assert found == {*half, *expected.tolist()}


@pytest.mark.parametrize("name", ["gradual+first_k", "first_k+gradual", "query+gradual", "gradual+random"])
def test_picks_of_the_static_one_survive_later_check_layers(name: str) -> None:
    tokens = tokens_of([200, 200])
    at_once = next(part for part in name.split("+") if part != "gradual")
    left = run(make_selector(BlendOptions(0.2, selector=name)), tokens)
    assert list(left) == [1, 4, 8, 16]
    assert len(left[1]) > len(left[16]), "gradual drops some at each"
    if name.startswith("gradual"):  # what gradual left over at the first check layer
        own = run(make_selector(BlendOptions(0.1, selector="gradual")), tokens)[1]
        rest = torch.tensor([at for at in range(tokens.total) if at not in own])
    else:
        rest = torch.arange(tokens.total)
    static = SELECTORS[at_once](BlendOptions(0.1))
    assert isinstance(static, RankedSelector)
    picked = rest[static.best(tokens.at(rest), 40)].tolist()
    assert len(picked) == 40
    for alive in left.values():
        assert set(picked) <= set(alive)


@pytest.mark.parametrize("layers", [2, 3, 5, 12, 30])
def test_order_of_the_names_makes_no_difference_to_the_check_layers(layers: int) -> None:
    for one, other in permutations(RANKED, 2):
        for given_layers in ((1,), (3,), (1, 4), (40,)):
            options = BlendOptions(0.2, check_layers=given_layers)
            names = (f"{one}+{other}", f"{other}+{one}")
            found, turned = (
                make_selector(replace(options, selector=name)).check_layers(layers) for name in names
            )
            assert found == turned == tuple(sorted(set(found))), (one, other)
            assert all(0 <= layer < layers for layer in found)
    assert make_selector(BlendOptions(0.2, selector="first_k+query")).check_layers(layers) == (0,)
    assert make_selector(BlendOptions(0.2, selector="first_k+hkvd")).check_layers(layers) == (1,)


@pytest.mark.parametrize("given_layers", [(2,), (3, 9), (25,)])
@pytest.mark.parametrize("name", ["hkvd+gradual", "gradual+hkvd"])
def test_parts_with_other_check_layers_do_not_drop_each_others_picks(
    name: str, given_layers: tuple[int, ...]
) -> None:
    tokens = tokens_of([300])
    left = run(make_selector(BlendOptions(0.2, check_layers=given_layers, selector=name)), tokens)
    assert max(given_layers[0], 1) == next(iter(left)), "not before both can choose"
    for alive, later in zip(list(left.values())[:-1], list(left.values())[1:], strict=True):
        assert set(later) <= set(alive)
    assert 30 <= len(left[max(left)]) <= 60


@pytest.mark.parametrize("name", PAIRS)
def test_nothing_is_chosen_where_there_is_no_choice(name: str) -> None:
    tokens = tokens_of([5, 9])
    for ratio, expected in ((0.0, []), (1.0, list(range(14)))):
        selector = make_selector(BlendOptions(ratio, selector=name))
        assert selector.check_layers(LAYERS) == (0,) and not selector.reads_question
        assert selector.select(0, tokens).tolist() == expected
    reads = make_selector(BlendOptions(0.5, selector=name)).reads_question
    assert reads == ("query" in name or "weighted" in name)


@pytest.mark.parametrize("name", ["hkvd", "gradual", "weighted"])
def test_threshold_of_a_part_leaves_the_rest_of_the_budget_unspent(name: str) -> None:
    tokens = tokens_of([100])
    left = run(make_selector(BlendOptions(0.2, threshold=2.0, selector=f"first_k+{name}")), tokens)
    assert left[1] == list(range(10)), "no token deviates that much"


@pytest.mark.parametrize(
    "name", ["best+hkvd", "hkvd+", "+", "hkvd+hkvd", "all+hkvd", "hkvd+none", "hkvd+first_k+random"]
)
@pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0])
def test_union_that_cannot_be_is_a_config_error_at_every_ratio(name: str, ratio: float) -> None:
    with pytest.raises(ConfigError, match=r"first_k"):
        make_selector(BlendOptions(ratio, selector=name))
