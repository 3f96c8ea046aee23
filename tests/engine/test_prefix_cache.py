"""Blended KV is approximate: it must never be taken for exact KV, nor for another recipe's."""

from __future__ import annotations

from typing import Any

import pytest

from blendrag.engine.client.generation import Sampling
from blendrag.engine.client.prior_turns import PriorTurns
from workbench import CHUNK_TOKENS, FIRST, Bench, distance

pytestmark = pytest.mark.engine

TEXT = Sampling(max_tokens=16, logprobs=20)


def test_a_plain_request_after_a_blended_one_is_untouched_by_it(bench: Bench) -> None:
    prompt = bench.prompt(bench.pieces[:5])
    before = bench.plain(prompt)
    blended = bench.blended(prompt, ratio=0.0)
    after = bench.engine.generate(prompt.token_ids, FIRST)
    assert after.prefix_tokens == 0
    assert after.logprobs == before.logprobs
    assert distance(before, blended) > 0.01  # the test can tell the two apart


def test_a_blended_request_after_a_plain_one_does_not_use_its_kv(bench: Bench) -> None:
    prompt = bench.prompt(bench.pieces[:5])
    alone = bench.blended(prompt, ratio=0.0)
    bench.plain(prompt)
    after = bench.engine.generate(prompt.token_ids, FIRST, bench.recipe(prompt, ratio=0.0))
    assert after.logprobs == alone.logprobs


def test_another_long_question_behind_a_prefix_hit_is_the_engines_own(bench: Bench) -> None:
    questions = [bench.pieces[number].token_ids * 2 for number in (8, 9)]
    one, two = (bench.prompt(bench.pieces[:6]).fresh(question) for question in questions)
    alone = bench.blended(two, TEXT, ratio=0.999)
    bench.blended(one, ratio=0.999)
    after = bench.engine.generate(two.token_ids, TEXT, bench.recipe(two, ratio=0.999))
    assert after.report is None and after.prefix_tokens >= sum(two.spans[-1][1:])
    assert after.token_ids == alone.token_ids
    assert distance(alone, after) < 1e-4


def test_blend_that_fails_leaves_no_block_that_spoils_the_next_answer(bench: Bench) -> None:
    questions = [bench.pieces[number].token_ids * 2 for number in (8, 9)]
    one, two = (bench.prompt(bench.pieces[:6]).fresh(question) for question in questions)
    full = bench.plain(two, TEXT)
    bench.reset()
    unknown, again = (
        bench.engine.generate(prompt.token_ids, TEXT, bench.recipe(prompt, selector="best"))
        for prompt in (one, two)
    )
    assert unknown.report and unknown.report.fallback and not unknown.report.prefix
    assert (
        again.report is None or again.report.fallback
    )  # what the engine has computed for the first is right
    assert again.token_ids == full.token_ids and distance(full, again) < 2e-3


@pytest.mark.parametrize("selector", ["query", "hkvd", "first_k"])
def test_next_turn_of_a_chat_is_a_prefix_hit(bench: Bench, selector: str) -> None:
    prompt = bench.prompt(bench.pieces[:5]).fresh(bench.pieces[9].token_ids)
    first = bench.blended(prompt, TEXT, selector=selector)
    later = prompt.fresh(first.token_ids).fresh(bench.encode("\nAnd in another word, they are"))
    answer = bench.engine.generate(later.token_ids, TEXT, bench.recipe(later, selector=selector))
    assert answer.report is None and answer.prefix_tokens > prompt.spans[-1][1] + CHUNK_TOKENS


@pytest.mark.parametrize("selector", ["query", "hkvd", "first_k"])
def test_document_that_joins_a_chat_leaves_those_before_it_as_they_are(bench: Bench, selector: str) -> None:
    options: dict[str, Any] = {"ratio": 0.999, "selector": selector}
    prompt = bench.prompt(bench.pieces[:5]).fresh(bench.pieces[9].token_ids)
    later = prompt.fresh(bench.blended(prompt, TEXT, **options).token_ids)
    for piece in bench.pieces[5:7]:
        later = later.cached(piece)
    later = later.fresh(bench.encode("\nIn short,"))
    joined = bench.engine.generate(later.token_ids, FIRST, bench.recipe(later, **options))
    assert joined.report and joined.report.prefix > prompt.spans[-1][1] + CHUNK_TOKENS
    assert joined.report.recomputed == joined.report.cached == 2 * CHUNK_TOKENS
    assert sum(joined.report.tiers.values()) == (7 if selector == "query" else 2)
    assert distance(bench.plain(later), joined) < 2e-3


@pytest.mark.parametrize("other", [{"ratio": 1.0}, {"selector": "first_k"}, {"selector": "hkvd:metric=k"}])
def test_another_recipe_does_not_hit_the_first_ones_kv(bench: Bench, other: dict[str, object]) -> None:
    prompt = bench.prompt(bench.pieces[:5])
    alone = bench.blended(prompt, **other)
    bench.blended(prompt)
    after = bench.engine.generate(prompt.token_ids, FIRST, bench.recipe(prompt, **other))
    assert after.report is not None
    assert after.logprobs == alone.logprobs


def test_an_unsalted_blended_request_is_not_blended(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = bench.prompt(bench.pieces[:5])
    full = bench.plain(prompt, TEXT)
    bench.reset()
    monkeypatch.setattr(PriorTurns, "salt", lambda *_: None)
    refused = bench.engine.generate(prompt.token_ids, TEXT, bench.recipe(prompt, ratio=0.0))
    assert refused.report and "salt" in refused.report.fallback
    assert refused.token_ids == full.token_ids
    assert refused.logprobs[0] == full.logprobs[0]
