from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendrag.errors import ConfigError
from blendrag.options import BlendOptions
from blendrag.select import SELECTORS, CachedTokens, Metric, Selector, make_selector, register_selector
from blendrag.select.deviation import deviation, squared_deviation, squared_norm
from blendrag.select.gradual import schedule
from blendrag.select.interface import budget
from cached_tokens import LENGTHS, tokens_of

NAMES = sorted(SELECTORS)
RATIOS = st.floats(0, 1, allow_subnormal=False)


def chosen(name: str, ratio: float, tokens: CachedTokens, layers: int = 8) -> torch.Tensor:
    selector = make_selector(BlendOptions(ratio, name))
    return selector.select(selector.check_layers(layers)[0], tokens)


# -- what every selector promises -----------------------------------------------------------------------


@given(st.sampled_from(NAMES), RATIOS, LENGTHS, st.one_of(st.none(), st.floats(0, 1)))
def test_no_selector_gives_unsorted_repeated_or_foreign_indices(
    name: str, ratio: float, lengths: list[int], threshold: float | None
) -> None:
    tokens = tokens_of(lengths)
    measured = threshold is not None and name in ("hkvd", "gradual")
    found = chosen(f"{name}:threshold={threshold!r}" if measured else name, ratio, tokens)
    assert found.dtype == torch.int64
    assert found.tolist() == sorted(set(found.tolist()))
    assert not found.numel() or (found[0] >= 0 and found[-1] < tokens.total)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("all", "none")])
def test_ratio_one_leaves_no_token_out_and_ratio_zero_takes_none(name: str) -> None:
    tokens = tokens_of([5, 9])
    assert chosen(name, 1.0, tokens).tolist() == list(range(14))
    assert chosen(name, 0.0, tokens).tolist() == []
    assert chosen("hkvd:threshold=0", 0.0, tokens).tolist() == []
    for ratio in (0.0, 1.0):  # decided before anything is computed
        assert make_selector(BlendOptions(ratio, selector=name)).check_layers(30) == (0,)


def test_ratio_one_under_a_threshold_is_measured_all_the_same() -> None:
    tokens = tokens_of([50])
    found = chosen("hkvd:threshold=0.25", 1.0, tokens)
    assert 0 < found.numel() < 50


def test_boundaries_do_not_depend_on_the_ratio() -> None:
    assert chosen("all", 0.3, tokens_of([7, 2])).tolist() == list(range(9))
    assert chosen("none", 0.3, tokens_of([7, 2])).tolist() == []


@given(st.sampled_from(["hkvd", "query", "random"]), st.floats(0.001, 1), LENGTHS)
def test_no_more_and_no_fewer_tokens_than_the_ratio_says(name: str, ratio: float, lengths: list[int]) -> None:
    total = sum(lengths)
    found = chosen(name, ratio, tokens_of(lengths))
    assert found.numel() == max(1, round(ratio * total))


def test_something_is_recomputed_when_anything_is_asked_for() -> None:
    assert budget(3, 0.01) == 1
    assert budget(0, 0.5) == budget(10, 0.0) == 0
    assert budget(10, 1.0) == 10


# -- each of them ---------------------------------------------------------------------------------------


@given(st.floats(0.001, 0.999), LENGTHS, st.integers(0, 9))
def test_hkvd_leaves_out_no_token_that_deviates_more(ratio: float, lengths: list[int], seed: int) -> None:
    tokens = tokens_of(lengths, seed)
    assert tokens.deviation is not None
    found = chosen("hkvd", ratio, tokens)
    rest = torch.ones(tokens.total, dtype=torch.bool)
    rest[found] = False
    assert not rest.any() or tokens.deviation[found].min() >= tokens.deviation[rest].max()


@given(st.floats(0.001, 1), LENGTHS, st.floats(0, 0.6))
def test_threshold_takes_only_what_exceeds_it_and_ratio_is_the_cap(
    ratio: float, lengths: list[int], threshold: float
) -> None:
    tokens = tokens_of(lengths)
    assert tokens.deviation is not None
    found = chosen(f"hkvd:threshold={threshold!r}", ratio, tokens)
    above = int((tokens.deviation > threshold * tokens.norm).sum())
    assert (tokens.deviation[found] > threshold * tokens.norm).all()
    assert found.numel() == min(above, max(1, round(ratio * tokens.total)))


def test_later_check_refers_to_all_tokens_and_not_to_the_survivors() -> None:
    survivors = CachedTokens(torch.arange(20), torch.full((20,), 100), 100, torch.rand(20))
    selector = make_selector(BlendOptions(0.15, "hkvd:check_layers=1+4"))
    assert selector.check_layers(8) == (1, 4)
    assert selector.select(4, survivors).numel() == 15
    few = CachedTokens(torch.arange(9), torch.full((9,), 100), 100, torch.rand(9))
    assert selector.select(4, few).tolist() == list(range(9))


@pytest.mark.parametrize("name", ["hkvd", "gradual"])
@pytest.mark.parametrize("layers", [2, 3, 4, 5, 12, 60])
def test_no_check_layer_lies_outside_a_small_model(name: str, layers: int) -> None:
    for given_layers in ((1,), (7,), (1, 4), (1, 2, 50), (20, 30)):
        written = "+".join(map(str, given_layers))
        checks = make_selector(BlendOptions(0.2, f"{name}:check_layers={written}")).check_layers(layers)
        assert checks and all(0 < layer < layers for layer in checks)
        assert list(checks) == sorted(set(checks))


def test_first_k_takes_the_head_of_every_chunk_and_no_token_more_by_rounding() -> None:
    """In chunks of any length, though floating point puts some products just above a whole number."""
    lengths = torch.arange(1, 1025)
    chunks = CachedTokens(torch.zeros_like(lengths), lengths, int(lengths.sum()))
    for percent in range(1, 100):
        exact = (lengths * percent + 99) // 100
        selector = make_selector(BlendOptions(percent / 100, selector="first_k"))
        last = selector.select(0, replace(chunks, offsets=exact - 1))  # the head's last token is taken
        after = selector.select(0, replace(chunks, offsets=exact))  # and the one behind it is not
        assert last.numel() == 1024 and not after.numel(), percent


def test_query_takes_what_the_question_looks_at_and_needs_no_check_layer() -> None:
    tokens = tokens_of([30, 50])
    assert tokens.attention is not None
    selector = make_selector(BlendOptions(0.25, selector="query"))
    assert selector.reads_question and selector.check_layers(30) == (0,)
    found = selector.select(0, replace(tokens, deviation=None))
    assert set(found.tolist()) == set(tokens.attention.topk(20).indices.tolist())


def test_only_query_reads_the_question_and_moves_what_it_does_not_recompute() -> None:
    for name in SELECTORS:
        selector, own = make_selector(BlendOptions(0.2, selector=name)), name == "query"
        assert selector.shifts == selector.reads_question == own, name
    assert not make_selector(BlendOptions(0.2, selector="query:shift=no")).shifts
    for ratio in (0.0, 1.0):  # nothing is left to choose
        assert not make_selector(BlendOptions(ratio, selector="query")).reads_question


def test_random_is_the_same_every_time_and_not_the_head() -> None:
    tokens = tokens_of([100])
    first, again = (chosen("random", 0.2, tokens).tolist() for _ in range(2))
    assert first == again != list(range(20))


# -- gradual --------------------------------------------------------------------------------------------


@given(st.data())
def test_schedule_of_any_layers_keeps_the_mean(data: st.DataObject) -> None:
    num_layers = data.draw(st.integers(2, 60))
    layers = data.draw(st.sets(st.integers(1, num_layers - 1), min_size=1, max_size=6))
    ratio = data.draw(st.floats(0.001, 0.999))
    shares = schedule(tuple(sorted(layers)), ratio, num_layers)
    assert all(later < share or later == 1.0 for share, later in pairwise(shares.values()))
    per_layer = []
    for start, end in pairwise([*shares, num_layers]):
        per_layer += [shares[start]] * (end - start)
    assert sum(per_layer) / len(per_layer) == pytest.approx(ratio, rel=1e-9)
    assert all(0.0 <= share <= 1.0 for share in per_layer)


def test_gradual_keeps_fewer_tokens_at_each_check() -> None:
    selector = make_selector(BlendOptions(0.15, selector="gradual"))
    tokens = tokens_of([400])
    assert tokens.deviation is not None
    counts = []
    deviation = tokens.deviation
    for layer in selector.check_layers(24):
        at = torch.arange(deviation.numel())
        kept = selector.select(layer, CachedTokens(at, at, tokens.total, deviation))
        deviation = deviation[kept]
        counts.append(kept.numel())
    assert counts == sorted(counts, reverse=True) and len(set(counts)) == 4
    spans = [3, 4, 8, 8]
    mean = sum(count * span for count, span in zip(counts, spans, strict=True)) / 23 / 400
    assert mean == pytest.approx(0.15, abs=0.003)


# -- errors and one's own -------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan"), float("inf")])
def test_impossible_ratio_is_a_config_error(ratio: float) -> None:
    with pytest.raises(ConfigError, match="recompute_ratio"):
        BlendOptions(ratio)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("hkvd:metric=q", "metric must be v or k or kv, not 'q'"),
        ("hkvd:metrik=k", r"unknown argument 'metrik'; there are auto_ratio, .*did you mean metric\?"),
        ("query:metric=k", "unknown argument 'metric'; there are auto_ratio"),
        ("hkvd:check_layers=4+1", r"check_layers must be ascending layers from 1, as in 1\+4\+8, not '4\+1'"),
        ("hkvd:check_layers=0", "check_layers must be ascending"),
        ("hkvd:check_layers=1+1", "check_layers must be ascending"),
        ("hkvd:check_layers=x", "check_layers must be ascending"),
        ("hkvd:threshold=-1", "threshold must be 0 or more"),
        ("hkvd:auto_ratio=maybe", "auto_ratio must be yes or no"),
        ("hkvd:k", "'k' is no argument with a value"),
    ],
)
def test_wrong_argument_is_named_with_what_it_must_be(written: str, said: str) -> None:
    for ratio in (0.0, 0.2, 1.0):
        with pytest.raises(ConfigError, match=said):
            make_selector(BlendOptions(ratio, written))


def test_arguments_reach_the_selector_that_they_are_written_behind() -> None:
    hkvd = make_selector(BlendOptions(0.2, "hkvd:metric=kv:check_layers=2+5:auto_ratio=yes"))
    assert (hkvd.reads_deviation, hkvd.check_layers(9), hkvd.auto_ratio) == ("kv", (2, 5), True)
    gradual = make_selector(BlendOptions(0.2, "gradual"))
    assert (gradual.reads_deviation, gradual.check_layers(30), gradual.auto_ratio) == (
        "v",
        (1, 4, 8, 16),
        False,
    )
    assert make_selector(BlendOptions(1.0, "first_k:auto_ratio=yes")).auto_ratio


@pytest.mark.parametrize("name", ["best", "first_k+hkvd", "hkvd ", ""])
@pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0])
def test_unknown_selector_is_a_config_error_at_every_ratio(name: str, ratio: float) -> None:
    with pytest.raises(ConfigError) as error:
        make_selector(BlendOptions(ratio, selector=name))
    assert str(error.value).startswith(f"unknown selector {name!r}; there are all, first_k, gradual, hkvd,")


def test_ones_own_selector_is_used() -> None:
    @register_selector("ends")
    class Ends(Selector):
        """The last token of every chunk."""

        def check_layers(self, num_layers: int) -> tuple[int, ...]:
            return (0,)

        def select(self, layer: int, tokens: CachedTokens) -> torch.Tensor:
            return torch.nonzero(tokens.offsets == tokens.lengths - 1, as_tuple=True)[0]

    try:
        assert chosen("ends", 0.15, tokens_of([3, 4])).tolist() == [2, 6]
    finally:
        del SELECTORS["ends"]


# -- deviations, which hkvd ranks by --------------------------------------------------------------------


def random(seed: int, n: int = 6) -> torch.Tensor:
    return torch.randn(n, 2, 8, generator=torch.Generator().manual_seed(seed))


def test_deviation_is_the_squared_distance_of_each_token() -> None:
    fresh, stored = random(1), random(2)
    expected = [float(((fresh[n] - stored[n]) ** 2).sum()) for n in range(6)]
    found = squared_deviation(fresh, stored)
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(expected)
    assert squared_deviation(fresh, fresh).tolist() == [0.0] * 6


def test_measuring_does_not_change_what_is_measured() -> None:
    fresh, stored = random(1), random(2)
    before = fresh.clone(), stored.clone()
    squared_deviation(fresh, stored)
    squared_norm(fresh)
    assert fresh.equal(before[0]) and stored.equal(before[1])


def test_half_precision_does_not_overflow() -> None:
    fresh = torch.full((2, 4, 64), 200.0, dtype=torch.float16)
    assert squared_deviation(fresh, -fresh).tolist() == [400.0**2 * 256] * 2
    assert squared_norm(fresh) == 200.0**2 * 256


@pytest.mark.parametrize("metric", get_args(Metric))
def test_metric_compares_what_it_is_named_after(metric: Metric) -> None:
    fresh, stored = [random(0), random(1)], [random(2), random(3)]
    found, norm = deviation(metric, fresh, stored)
    parts = {"k": [0], "v": [1], "kv": [0, 1]}[metric]
    torch.testing.assert_close(found, sum(squared_deviation(fresh[at], stored[at]) for at in parts))
    assert norm == pytest.approx(sum(float((fresh[at] ** 2).sum()) / 6 for at in parts))


def test_norm_of_no_token_does_not_divide_by_zero() -> None:
    assert squared_norm(torch.empty(0, 2, 8)) == 1.0
