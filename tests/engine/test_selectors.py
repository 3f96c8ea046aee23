"""Every selector on the engine: it recomputes what it was given, and full prefill when that is everything."""

from __future__ import annotations

import math
from itertools import permutations
from typing import Any

import pytest
from workbench import FIRST, Bench, distance

from blendrag.fuse import SELECTORS, SelectorOptions, make_selector
from blendrag.fuse.gradual import GradualHKVD
from blendrag.fuse.selector import budget

pytestmark = pytest.mark.engine

RATIO = 0.2
CHUNKS, LENGTH = 4, 96
CACHED = CHUNKS * LENGTH
EXACT = ["hkvd", "query", "random"]
UNIONS = ["+".join(pair) for pair in permutations([*EXACT, "first_k"], 2)]
CLOSE = 2e-3  # float32, two orders of the same sums


def report_of(bench: Bench, **options: Any) -> dict[str, Any]:
    report = bench.blended(bench.prompt(bench.pieces[8 : 8 + CHUNKS]), **options).report
    assert report is not None and report["cached"] == CACHED
    return report


@pytest.mark.parametrize("name", [*EXACT, *UNIONS])
@pytest.mark.parametrize("ratio", [0.02, RATIO])
def test_no_selector_recomputes_more_or_less_than_its_budget(bench: Bench, name: str, ratio: float) -> None:
    assert report_of(bench, selector=name, ratio=ratio)["recomputed"] == budget(CACHED, ratio)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("first_k", CHUNKS * math.ceil(RATIO * LENGTH)), ("all", CACHED), ("none", 0)],
)
def test_selectors_that_round_by_chunk_or_know_no_ratio_keep_to_that(
    bench: Bench, name: str, expected: int
) -> None:
    assert report_of(bench, selector=name, ratio=RATIO)["recomputed"] == expected


@pytest.mark.parametrize("name", ["gradual", "gradual+first_k", "query+gradual"])
def test_gradual_ends_with_its_last_share_and_keeps_the_others_picks(
    bench: Bench, engine: Any, name: str
) -> None:
    half = 0.5 if "+" in name else 1.0
    gradual = make_selector("gradual", SelectorOptions(half * RATIO))
    assert isinstance(gradual, GradualHKVD)
    last = gradual.share(gradual.check_layers(engine.facts["num_layers"])[-1])
    expected = budget(CACHED, last + (1 - half) * RATIO)
    assert report_of(bench, selector=name, ratio=RATIO)["recomputed"] == expected


@pytest.mark.parametrize("name", ["query", "query+hkvd", "first_k+hkvd", "random+query", "hkvd+random"])
def test_recomputing_every_token_gives_full_prefills_answer(bench: Bench, name: str) -> None:
    prompt = bench.prompt(bench.pieces[:CHUNKS])
    full, blended = bench.plain(prompt), bench.blended(prompt, selector=name, ratio=0.999)
    assert blended.report and blended.report["recomputed"] == CACHED  # 0.999 of them rounds to all
    assert distance(full, blended) < CLOSE


def test_prompt_that_asks_nothing_is_answered_under_a_selector_that_reads_the_question(bench: Bench) -> None:
    prompt = bench.prompt(bench.pieces[:2], question="")
    ending = type(prompt)(prompt.token_ids[: prompt.spans[-1][1] + LENGTH], prompt.spans)
    report = bench.blended(ending, selector="query", ratio=RATIO).report
    assert report and report["recomputed"] == budget(report["cached"], RATIO)


def test_every_registered_selector_was_tried_here() -> None:
    assert {*EXACT, "first_k", "all", "none", "gradual"} == set(SELECTORS)


def test_lmcache_semantics_recompute_the_same_number_under_another_mask(bench: Bench) -> None:
    prompt = bench.prompt(bench.pieces[8 : 8 + CHUNKS])
    recipe = bench.recipe(prompt, ratio=RATIO).as_lmcache()
    bench.reset()
    leaky = bench.engine.generate(prompt.token_ids, FIRST, recipe)
    exact = bench.blended(prompt, ratio=RATIO, metric="k")
    assert leaky.report and "fallback" not in leaky.report
    assert leaky.report["recomputed"] == budget(CACHED, RATIO)
    assert distance(leaky, exact) > CLOSE, "selected tokens saw the future"


def test_unknown_selector_ends_in_a_plain_prefill_and_says_so(bench: Bench) -> None:
    prompt = bench.prompt(bench.pieces[:2])
    bench.reset()
    delta = bench.engine.generate(prompt.token_ids, FIRST, bench.recipe(prompt, selector="best+hkvd"))
    assert delta.report and "best" in delta.report["fallback"]
