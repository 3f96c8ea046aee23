"""The same prompt gives the same answer, whoever computes which part of it, and whatever else is asked."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from blendrag.engine.client.generation import Delta, Sampling
from workbench import FIRST, Bench, Prompt

pytestmark = pytest.mark.engine

TEXT = Sampling(max_tokens=12, logprobs=5)
OPTIONS = [{"selector": "query"}, {"selector": "hkvd"}, {"ratio": 1.0}, {"ratio": 0.0}]


def assert_same(one: Delta, other: Delta) -> None:
    """To the last digit: the same numbers come out of the same kernels."""
    assert other.token_ids == one.token_ids
    assert other.logprobs == one.logprobs


@pytest.fixture(params=[0, 13], ids=["ends with a block", "ends inside a block"])
def prompt(bench: Bench, request: pytest.FixtureRequest) -> Prompt:
    """Five documents, the last of which ends as the name says."""
    whole = bench.prompt(bench.pieces[:5])
    opening = whole.token_ids[: request.param]
    spans = tuple((key, start + len(opening), length) for key, start, length in whole.spans)
    return Prompt((*opening, *whole.token_ids), spans)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_prefix_hit_gives_what_blending_gave(bench: Bench, prompt: Prompt, options: dict[str, Any]) -> None:
    first = bench.blended(prompt, TEXT, **options)
    again = bench.engine.generate(prompt.token_ids, TEXT, bench.recipe(prompt, **options))
    assert again.report is None and again.prefix_tokens > prompt.spans[-1][1]
    assert_same(first, again)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_another_time_and_from_disk_it_is_blended_to_the_same(
    bench: Bench, prompt: Prompt, options: dict[str, Any]
) -> None:
    first = bench.blended(prompt, TEXT, **options)
    bench.client.empty_ram()
    cold = bench.blended(prompt, TEXT, **options)
    assert cold.report and cold.report.tiers == {"disk": 5}
    assert_same(first, cold)


def test_everything_recomputed_is_the_engines_own_prefill(bench: Bench, prompt: Prompt) -> None:
    assert_same(bench.plain(prompt, TEXT), bench.blended(prompt, TEXT, ratio=1.0))


def test_others_beside_it_do_not_change_it(bench: Bench, prompt: Prompt) -> None:
    generate = bench.engine.generate
    alone = bench.blended(prompt, TEXT, selector="query")
    plain, *blended = [bench.prompt(bench.pieces[at : at + 3]) for at in range(8, 12)]
    bench.reset()
    with ThreadPoolExecutor(5) as pool:
        beside = [pool.submit(generate, plain.token_ids, Sampling(max_tokens=40))]
        beside += [pool.submit(generate, one.token_ids, FIRST, bench.recipe(one)) for one in blended]
        asked = pool.submit(generate, prompt.token_ids, TEXT, bench.recipe(prompt, selector="query"))
        # Later tokens are computed in one step with the others': rounded as plain answers' then are.
        assert asked.result().logprobs[0] == pytest.approx(alone.logprobs[0], abs=1e-4)
        assert all(one.result().token_ids for one in beside)
