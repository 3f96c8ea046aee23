"""Every selector on the engine: it recomputes what it was given, and full prefill when that is everything."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from blendrag.engine.compat.connector import least_rows
from blendrag.engine.wire.report import BlendReport
from blendrag.select import SELECTORS
from blendrag.select.interface import RankedSelector, budget
from workbench import FIRST, Bench, distance

pytestmark = pytest.mark.engine

RATIO = 0.2
CHUNKS, LENGTH = 4, 96
CACHED = CHUNKS * LENGTH
EXACT = [name for name, kind in SELECTORS.items() if issubclass(kind, RankedSelector) and name != "gradual"]
METRICS = [f"hkvd:metric={metric}" for metric in ("k", "kv")]
UNKNOWN = "Nobody has stored this sentence."
CLOSE = 2e-3  # float32, two orders of the same sums


def report_of(bench: Bench, **options: Any) -> BlendReport:
    prompt = bench.prompt(bench.pieces[8 : 8 + CHUNKS])
    report = bench.blended(prompt, **options).report
    assert report is not None and report.cached == CACHED
    claimed = bench.recipe(prompt).claim(len(prompt.token_ids), bench.engine.facts.block_size, least_rows())
    assert report.fresh + report.cached == claimed
    return report


@pytest.mark.parametrize("name", [*EXACT, *METRICS, "hkvd:check_layers=1+3+7"])
@pytest.mark.parametrize("ratio", [RATIO, 0.02])
def test_selectors_recompute_exactly_their_budget(bench: Bench, name: str, ratio: float) -> None:
    assert report_of(bench, selector=name, ratio=ratio).recomputed == budget(CACHED, ratio)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("first_k", CHUNKS * math.ceil(RATIO * LENGTH)), ("all", CACHED), ("none", 0)],
)
def test_selectors_that_round_by_chunk_or_know_no_ratio_keep_to_that(
    bench: Bench, name: str, expected: int
) -> None:
    assert report_of(bench, selector=name, ratio=RATIO).recomputed == expected


@pytest.mark.parametrize("name", ["gradual", "gradual:metric=k", "gradual:metric=kv"])
def test_gradual_recomputes_the_ratio_on_average(bench: Bench, name: str) -> None:
    recomputed = report_of(bench, selector=name, ratio=RATIO).recomputed
    assert recomputed == pytest.approx(budget(CACHED, RATIO), abs=2)  # each layer's share is rounded


def test_every_registered_selector_was_tried_here() -> None:
    assert {*EXACT, "gradual", "first_k", "all", "none"} == set(SELECTORS)


def test_lmcache_semantics_recompute_the_same_number_under_another_mask(bench: Bench) -> None:
    prompt = bench.prompt(bench.pieces[8 : 8 + CHUNKS])
    recipe = bench.recipe(prompt, ratio=RATIO, selector="lmcache")
    bench.reset()
    leaky = bench.engine.generate(prompt.token_ids, FIRST, recipe)
    exact = bench.blended(prompt, ratio=RATIO, selector="hkvd:metric=k")
    assert leaky.report and not leaky.report.fallback
    assert leaky.report.recomputed == budget(CACHED, RATIO)
    assert distance(leaky, exact) > CLOSE, "selected tokens saw the future"


def test_lmcache_semantics_do_not_use_what_stands_behind_a_missing_chunk(bench: Bench) -> None:
    first, second = bench.pieces[8:10]
    unknown = bench.piece(UNKNOWN)
    prompt = bench.prompt([first, unknown, second, first])
    bench.reset()
    delta = bench.engine.generate(
        prompt.token_ids, FIRST, bench.recipe(prompt, ratio=RATIO, selector="lmcache")
    )
    assert delta.report and not delta.report.fallback, delta.report
    assert delta.report.cached == LENGTH and set(delta.report.missing) == {unknown.key}


@pytest.mark.parametrize("tail", ["", " and so on" * 200])
def test_prompt_without_a_question_is_repaired_by_gradual(bench: Bench, tail: str) -> None:
    """It ends with a document; or what stands behind it is long, and left to the engine."""
    prompt = bench.prompt(bench.pieces[8 : 8 + CHUNKS], tail)
    if not tail:
        prompt = replace(prompt, token_ids=prompt.token_ids[: sum(prompt.spans[-1][1:])])
    names = ("query", "gradual")
    reports = [bench.blended(prompt, selector=name, ratio=RATIO).report for name in names]
    assert [report and report.selector for report in reports] == ["gradual", "gradual"]
    assert reports[0] and reports[1] and reports[0].recomputed == reports[1].recomputed > 0


def test_missing_last_document_is_not_taken_for_the_question(bench: Bench) -> None:
    prompt = bench.prompt([*bench.pieces[8 : 8 + CHUNKS], bench.piece(8 * UNKNOWN)])
    unasked = replace(prompt, token_ids=prompt.token_ids[: sum(prompt.spans[-1][1:])])
    for each, selector in ((prompt, "query"), (unasked, "gradual")):
        report = bench.blended(each, selector="query", ratio=RATIO).report
        assert report and report.cached == CACHED and len(report.missing) == 1
        assert report.selector == selector
