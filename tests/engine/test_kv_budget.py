"""Answers that are decoded from a part of their prompt's KV, on an engine of their own with few blocks."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from rich.console import Console

from blendrag.engine.client.generation import Delta, Sampling
from blendrag.engine.wire.recipe import Recipe
from blendrag.lab.evaluate.arms import parse_arms
from blendrag.lab.evaluate.run import EvalOptions, run_eval
from blendrag.lab.running import lab_engine
from blendrag.progress import SILENT
from blendrag.settings import Settings
from blendrag.store.contexts import Chunk
from blendrag.store.identity import KVIdentity
from workbench import Bench, Prompt, distance

pytestmark = [
    pytest.mark.own_engine,
    pytest.mark.nightly,
    pytest.mark.xdist_group("kv-budget"),
]

BLOCK, BLOCKS = 32, 160
TEXT = Sampling(max_tokens=40, logprobs=20, other={"ignore_eos": True})
BUDGET = 256


@pytest.fixture(scope="module")
def few_blocks(
    engine_options: dict[str, Any],
    tokenizer: Any,
    identity: KVIdentity,
    chunks: list[Chunk],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Bench]:
    """Room for two prompts of 20 chunks. A blend takes one step, so that how long answers beside it become
    does not depend on the processor."""
    arguments = engine_options.get("engine_args", {}) | {"num_gpu_blocks_override": BLOCKS}
    own = {"kv_budget": BUDGET, "blend_share": 1.0, "engine_args": arguments}
    settings = Settings.load(**engine_options | own)
    engine = lab_engine(settings)
    assert engine.facts.block_size == BLOCK
    bench = Bench(engine, tokenizer, identity, tmp_path_factory.mktemp("kb"), chunks).open()
    yield bench
    bench.close()
    engine.release()


def held() -> float:
    """Blocks that requests hold, by vLLM's own gauge."""
    return counted("kv_cache_usage_perc") * (BLOCKS - 1)


def counted(name: str) -> float:
    """By vLLM, in the one series there is of this name."""
    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    return [sample.value for sample in samples if sample.name == f"vllm:{name}"][-1]


def generate(bench: Bench, prompt: Prompt, **options: Any) -> Delta:
    bench.reset()
    recipe = bench.recipe(prompt, selector="query", **options)
    return bench.engine.generate(prompt.token_ids, TEXT, recipe)


def check_same(tokens: list[int], alone: Delta) -> None:
    """Up to where two tokens are as likely, which may change places: steps beside others round otherwise."""
    for mine, theirs, of in zip(tokens, alone.token_ids, alone.logprobs, strict=False):
        if mine != theirs:
            assert of[theirs] - of[mine] < 0.3
            return


def test_first_token_is_the_same_and_the_evidence_says_what_was_kept(few_blocks: Bench) -> None:
    prompt = few_blocks.prompt(few_blocks.pieces[:20])
    whole = generate(few_blocks, prompt)
    assert whole.report is not None
    assert (whole.report.kv_kept, whole.report.kv_freed, whole.report.kv_whole) == (0, 0, "")
    evicted = generate(few_blocks, prompt, kv_budget=BUDGET)
    assert evicted.report is not None and not evicted.report.kv_whole
    last = (len(prompt.token_ids) - 1) // BLOCK
    assert evicted.report.kv_freed == last - (BUDGET // BLOCK - 1)
    assert BUDGET - BLOCK < evicted.report.kv_kept <= BUDGET
    assert distance(whole, evicted) == 0.0
    for tokens in (1, 2):
        few_blocks.reset()
        recipe = few_blocks.recipe(prompt, selector="query", kv_budget=BUDGET)
        short = few_blocks.engine.generate(prompt.token_ids, replace(TEXT, max_tokens=tokens), recipe)
        assert short.report is not None
        assert short.report.kv_whole == "the answer ended with its first tokens"
    assert few_blocks.blended(prompt).report, "no block is held"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv_budget": 100_000}, "the prompt is no longer than the budget"),
        ({"kv_budget": 63}, "kv_budget is below 64"),
        ({"kv_budget": "128:windo"}, "unknown allocator or scorer"),
    ],
)
def test_answer_that_keeps_all_kv_is_the_same_and_says_why(
    few_blocks: Bench, options: dict[str, Any], reason: str
) -> None:
    prompt = few_blocks.prompt(few_blocks.pieces[:6])
    whole, kept = generate(few_blocks, prompt), generate(few_blocks, prompt, **options)
    assert kept.report is not None and reason in kept.report.kv_whole and not kept.report.kv_freed
    assert kept.token_ids == whole.token_ids


async def at_once(bench: Bench, prompts: list[Prompt], most: list[float], **options: Any) -> list[list[int]]:
    async def one(prompt: Prompt) -> list[int]:
        tokens: list[int] = []
        recipe = bench.recipe(prompt, selector="query", **options)
        async for delta in bench.engine.astream(prompt.token_ids, TEXT, recipe):
            tokens += delta.token_ids
            most.append(held())
        return tokens

    return list(await asyncio.gather(*map(one, prompts)))


def test_requests_beside_others_give_the_same_texts_and_hold_less_kv(few_blocks: Bench) -> None:
    """Mixed steps: evicted rows, whole ones, and a prompt that is prefilled plainly; the pool turns over."""
    prompts = [few_blocks.prompt(few_blocks.pieces[n : n + 18]) for n in range(6)] * 2
    alone = [generate(few_blocks, prompt, kv_budget=BUDGET) for prompt in prompts[:6]] * 2
    few_blocks.reset()
    most: list[float] = []
    answers = asyncio.run(at_once(few_blocks, prompts, most, kv_budget=BUDGET))
    for tokens, whole in zip(answers, alone, strict=True):
        assert len(tokens) == len(whole.token_ids)
        check_same(tokens, whole)
    one = len(prompts[0].token_ids) // BLOCK
    assert max(most) < BLOCKS and most[-1] <= 2 * one
    few_blocks.reset()


def test_pool_for_four_prompts_runs_sixteen_and_preempts_none(few_blocks: Bench) -> None:
    """No answer ends before all of them run: how long a prompt is blended beside others does not matter."""
    prompts = [few_blocks.prompt(few_blocks.pieces[n : n + 12]) for n in range(4)] * 4
    assert (BLOCKS - 1) // -(-len(prompts[0].token_ids) // BLOCK) == 4
    recipes = [few_blocks.recipe(prompt, 0.0, "none", kv_budget=BUDGET // 2) for prompt in prompts]
    few_blocks.reset()
    asked = list(zip(prompts, recipes, strict=True))
    alone = [few_blocks.engine.generate(prompt.token_ids, TEXT, recipe) for prompt, recipe in asked[:4]]
    long, running, preempted = replace(TEXT, max_tokens=300), [0.0], counted("num_preemptions_total")

    async def one(prompt: Prompt, recipe: Recipe) -> list[int]:
        tokens, stream = list[int](), few_blocks.engine.astream(prompt.token_ids, long, recipe)
        async for delta in stream:
            tokens += delta.token_ids
            running.append(counted("num_requests_running"))
            if max(running) == len(prompts) and len(tokens) >= TEXT.max_tokens:
                break
        await stream.aclose()
        return tokens

    async def all_at_once() -> list[list[int]]:
        return list(await asyncio.gather(*(one(*pair) for pair in asked)))

    for tokens, whole in zip(asyncio.run(all_at_once()), alone * 4, strict=True):
        check_same(tokens, whole)
    assert max(running) == len(prompts)
    assert counted("num_preemptions_total") == preempted
    few_blocks.reset()


def test_preempted_answer_is_the_same_and_loses_no_block(few_blocks: Bench) -> None:
    prompt, engine = few_blocks.prompt(few_blocks.pieces[:18], aligned=False), few_blocks.engine
    alone = generate(few_blocks, prompt, kv_budget=BUDGET)
    for after in (1, 3, 20):
        few_blocks.reset()
        recipe = few_blocks.recipe(prompt, selector="query", kv_budget=BUDGET)
        stream = engine.stream(prompt.token_ids, TEXT, recipe)
        tokens = [token for _ in range(after) for token in next(stream).token_ids]
        assert tokens == alone.token_ids[: len(tokens)]
        few_blocks.preempt_all()
        tokens += [token for delta in stream for token in delta.token_ids]
        assert len(tokens) == len(alone.token_ids)
        check_same(tokens, alone)  # what follows was evicted anew, with tokens behind the prompt
    few_blocks.reset()
    assert few_blocks.blended(prompt).report


def test_stopped_answers_give_their_kv_back_once(few_blocks: Bench) -> None:
    prompt = few_blocks.prompt(few_blocks.pieces[:18])
    endless = Sampling(max_tokens=2000, other={"ignore_eos": True})
    for number in range(12):
        recipe = few_blocks.recipe(prompt, selector="query", kv_budget=BUDGET)
        stream = few_blocks.engine.stream(prompt.token_ids, endless, recipe)
        for _ in range(1 + number % 3):
            next(stream)
        stream.close()  # type: ignore[attr-defined]
    few_blocks.reset()
    assert few_blocks.blended(prompt).report


def test_eval_of_budgets_ends_well_and_tells_of_short_answers(
    few_blocks: Bench, texts: list[str], tmp_path: Path
) -> None:
    data, printed = tmp_path / "mine.jsonl", Console(file=io.StringIO(), width=160)
    row = {"question": "What is it about?", "answer": "Python packages", "documents": texts[:4]}
    data.write_text(json.dumps(row))
    settings = few_blocks.engine.settings
    arms = parse_arms(["128:ada", "128:uniform"], None, settings)
    results = run_eval(settings, EvalOptions(data, "jsonl", arms, max_tokens=4), SILENT)
    assert list(results.decoding) == [arm.name for arm in arms if arm.budget]
    for arm in results.decoding.values():
        assert 0 < arm.kept.mean < 0.5 and arm.kl.mean > 0 and arm.nll_loss is not None
    assert results.decoding[arms[2].name].kl_to_uniform is not None
    results.show(printed)
    second_table = printed.file.getvalue().partition("- uniform's")[2]  # type: ignore[attr-defined]
    assert all(name in second_table for name in results.decoding)
