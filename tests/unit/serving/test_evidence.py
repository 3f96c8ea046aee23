"""How what was planned and what the engine said become evidence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.engine.wire.prefixes import PrefixPath
from blendrag.engine.wire.recipe import Recipe
from blendrag.engine.wire.report import BlendReport
from blendrag.prompt import PromptPlan, Segment
from blendrag.serving.evidence import Evidence, PlannedPrompt

PLAN = PromptPlan(
    (
        Segment("root", (1,) * 10),
        Segment("a", (2,) * 30, "a"),
        Segment("b", (3,) * 40, "b"),
        Segment("question", (4,) * 20),
    ),
    (),
)
RECIPE = Recipe("store", PLAN.spans)
NODES = (("n0", 10), ("n1", 40), ("n2", 80))


def path(held: int) -> PrefixPath:
    return PrefixPath("tree", NODES, held, 3)


def made(
    report: BlendReport | None,
    recipe: Recipe | None = None,
    path: PrefixPath | None = None,
    prefix: int = 0,
    budget: int | None = None,
) -> Evidence:
    plain = None if recipe else "blending is switched off"
    return PlannedPrompt(PLAN, recipe, path, plain, budget).evidence(report, prefix)


@given(st.integers(0, 80), st.integers(0, 80), st.integers(0, 30))
def test_each_token_of_a_prompt_is_counted_once(prefix: int, exact: int, recomputed: int) -> None:
    exact = min(exact, 80 - prefix)
    cached = min(80 - prefix - exact, 70)
    recomputed = min(recomputed, cached)
    blend = BlendReport(prefix=prefix, exact=exact, cached=cached, recomputed=recomputed)
    load = BlendReport(prefix=prefix, exact=exact)
    for found in (made(blend, RECIPE), made(load, path=path(3)), made(load, path=path(2))):
        assert found.reused + found.recomputed + found.fresh + found.prefix == found.prompt == 100
        assert found.exact == exact <= found.reused


@pytest.mark.parametrize(("prefix", "again"), [(0, 0), (10, 0), (32, 22), (80, 70), (96, 70)])
def test_documents_in_the_prefix_cache_do_not_count_as_reused_as_well(prefix: int, again: int) -> None:
    behind = BlendReport(prefix=prefix, cached=70 - again, recomputed=min(5, 70 - again))
    for found in (made(None, RECIPE, prefix=prefix), made(behind, RECIPE)):
        assert found.prefix == prefix - again
        assert found.reused + found.recomputed + found.fresh + found.prefix == 100
    assert found.reused + found.recomputed == 70, "all documents, whatever was found where"


@pytest.mark.parametrize(
    ("found", "mode", "plain"),
    [
        (made(BlendReport(exact=80), path=path(3)), "exact", None),
        (made(None, path=path(3), prefix=64), "exact", None),
        (made(BlendReport(exact=40), path=path(2)), "plain", "blending is switched off"),
        (made(None, path=path(0)), "plain", "blending is switched off"),
        (made(None), "plain", "blending is switched off"),
        (made(BlendReport(exact=40, cached=40), RECIPE), "mixed", None),
        (made(BlendReport(cached=70), RECIPE), "blended", None),
        (made(None, RECIPE, prefix=90), "blended", None),
        (
            made(BlendReport(fallback="lost", cause="error"), RECIPE),
            "plain",
            "fell back to plain prefill: lost",
        ),
    ],
)
def test_mode_is_that_of_the_prefill(found: Evidence, mode: str, plain: str | None) -> None:
    assert (found.mode, found.plain) == (mode, plain)


def test_prefix_that_could_not_be_loaded_is_not_called_exact() -> None:
    found = made(BlendReport(fallback="NodeMissingError: k is missing", cause="error"), path=path(3))
    assert found.mode == "plain" and found.exact == 0 and found.fresh == 100


def test_exact_prefix_stays_where_the_rest_is_sooner_prefilled_than_loaded() -> None:
    found = made(replace(BlendReport.refused("it is slow", 10), exact=30), RECIPE)
    assert (found.mode, found.plain) == ("plain", "fell back to plain prefill: it is slow")
    assert (found.prefix, found.exact, found.reused, found.fresh) == (10, 30, 30, 60)


def test_budget_that_nothing_came_of_is_told_of() -> None:
    evicted = BlendReport(cached=70, kv_kept=64, kv_freed=2)
    lost = BlendReport(fallback="lost", cause="error")
    asked: dict[str, Any] = {"budget": 64}
    assert made(BlendReport(exact=80), path=path(3), **asked).kv_whole == "its documents are exact prefixes"
    for plain in (made(None, **asked), made(None, path=path(2), **asked), made(lost, RECIPE, **asked)):
        assert plain.kv_whole == "it was not blended"
    assert made(evicted, RECIPE, **asked).kv_whole == ""
    assert made(BlendReport(cached=70, kv_whole="it is short"), RECIPE, **asked).kv_whole == "it is short"
    for none in (made(BlendReport(exact=80), path=path(3)), made(None), made(lost, RECIPE)):
        assert none.kv_whole == ""


@pytest.mark.parametrize(("held", "reused"), [(0, [0, 0]), (2, [30, 0]), (3, [30, 40])])
def test_document_whose_kv_is_not_there_is_not_told_as_reused(held: int, reused: list[int]) -> None:
    """But for what is an exact prefix."""
    unstored = frozenset({"a", "b"})
    prompt = PlannedPrompt(PLAN, path=path(held) if held else None, unstored=unstored)
    rows = [row for row in prompt.evidence(None, 0).documents if row["chunk_key"]]
    assert [row["reused"] for row in rows] == reused
    assert [row["kind"] for row in rows] == ["cached" if tokens else "fresh" for tokens in reused]
