"""The same prompt gives the same answer, whoever computes which part of it, and whatever else is asked."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from blendrag.engine.client.generation import Delta, Sampling
from one_engine import ENGINE
from workbench import FIRST, Bench, Prompt

pytestmark = pytest.mark.engine

TEXT = Sampling(max_tokens=12, logprobs=5)
OPTIONS = [
    {"selector": "query:shift=no"},
    {"selector": "query"},
    {"selector": "hkvd"},
    {"ratio": 1.0},
    {"ratio": 0.0},
]


def distance(one: Delta, other: Delta) -> float:
    """The most that a log probability differs by, of tokens that both name."""
    pairs = zip(one.logprobs, other.logprobs, strict=True)
    return max(abs(a[token] - b[token]) for a, b in pairs for token in a.keys() & b.keys())


def assert_same(one: Delta, other: Delta, rounding: float) -> None:
    """To the last digit, where the same numbers come out of the same kernels."""
    assert other.token_ids == one.token_ids
    assert distance(one, other) <= rounding


@pytest.fixture(scope="module", params=[0, 13], ids=["ends with a block", "ends inside a block"])
def prompt(bench: Bench, request: pytest.FixtureRequest) -> Prompt:
    """Five documents, the last of which ends as the name says."""
    whole = bench.prompt(bench.pieces[:5])
    opening = whole.token_ids[: request.param]
    spans = tuple((key, start + len(opening), length) for key, start, length in whole.spans)
    return Prompt((*opening, *whole.token_ids), spans)


@pytest.fixture(scope="module")
def rounding(bench: Bench, prompt: Prompt) -> float:
    """What the engine's own prefill of the prompt and prefix hits differ by, which have fewer rows in a step:
    nothing, where the processor's kernels round a row alike however many there are beside it."""
    plain, hits = bench.plain(prompt, TEXT), []
    for known in (len(prompt.token_ids), len(prompt.token_ids) // 2):
        bench.reset()
        bench.engine.generate(prompt.token_ids[:known], TEXT)
        hits.append(bench.engine.generate(prompt.token_ids, TEXT))
    assert all(hit.prefix_tokens and hit.token_ids == plain.token_ids for hit in hits)
    return 4 * max(distance(plain, hit) for hit in hits)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_prefix_hit_gives_what_blending_gave(
    bench: Bench, prompt: Prompt, options: dict[str, Any], rounding: float
) -> None:
    first = bench.blended(prompt, TEXT, **options)
    again = bench.engine.generate(prompt.token_ids, TEXT, bench.recipe(prompt, **options))
    assert again.report is None and again.prefix_tokens > prompt.spans[-1][1]
    assert_same(first, again, rounding)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_another_time_and_from_disk_it_is_blended_to_the_same(
    bench: Bench, prompt: Prompt, options: dict[str, Any], rounding: float
) -> None:
    first = bench.blended(prompt, TEXT, **options)
    bench.client.empty_ram()
    cold = bench.blended(prompt, TEXT, **options)
    assert cold.report and cold.report.tiers == {"disk": 5}
    assert_same(first, cold, rounding)


def test_everything_recomputed_is_the_engines_own_prefill(
    bench: Bench, prompt: Prompt, rounding: float
) -> None:
    assert_same(bench.plain(prompt, TEXT), bench.blended(prompt, TEXT, ratio=1.0), rounding)


def test_seed_gives_the_same_answer_to_a_prompt_in_parts_as_to_one_that_is_blended_or_known(
    bench: Bench,
) -> None:
    """What the engine samples behind a part of a prompt, and discards, takes nothing from the seed."""
    prompt, drawn = bench.prompt(bench.pieces[:6]), Sampling(max_tokens=8, temperature=1.0, seed=5)
    assert len(prompt.token_ids) > ENGINE["engine_args"]["max_num_batched_tokens"]
    in_parts = bench.plain(prompt, drawn)
    known = bench.engine.generate(prompt.token_ids, drawn)
    assert bench.blended(prompt, drawn, ratio=1.0).token_ids == in_parts.token_ids == known.token_ids


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
