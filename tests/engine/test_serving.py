"""Many requests at once, stopped, preempted, from threads and from event loops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, islice

import pytest

from blendrag.engine.client.generation import Delta, Sampling
from blendrag.engine.wire.recipe import Recipe
from workbench import Bench, Prompt

pytestmark = pytest.mark.engine

TEXT = Sampling(max_tokens=12)
ENDLESS = Sampling(max_tokens=3000)


@dataclass(frozen=True, slots=True)
class Job:
    prompt: Prompt
    recipe: Recipe | None

    def run(self, bench: Bench, sampling: Sampling = TEXT) -> Delta:
        return bench.engine.generate(self.prompt.token_ids, sampling, self.recipe)

    def check(self, delta: Delta) -> None:
        """It was blended if it was to be."""
        assert not (delta.report and delta.report.fallback), delta.report


def mixed_jobs(bench: Bench, count: int) -> list[Job]:
    """Every second one plain, the others by different recipes; documents partly the same."""
    options = [
        {"ratio": 0.15},
        {"ratio": 0.0},
        {"selector": "first_k"},
        {"ratio": 0.5, "selector": "hkvd:metric=k"},
    ]
    jobs = []
    for number in range(count):
        pieces = [bench.pieces[(3 * number + i) % len(bench.pieces)] for i in range(1 + number % 4)]
        prompt = bench.prompt(pieces)
        recipe = bench.recipe(prompt, **options[number // 2 % 4]) if number % 2 else None
        jobs.append(Job(prompt, recipe))
    return jobs


def one_by_one(bench: Bench, jobs: Sequence[Job], sampling: Sampling = TEXT) -> list[str]:
    texts = []
    for job in jobs:
        bench.reset()
        delta = job.run(bench, sampling)
        job.check(delta)
        texts.append(delta.text)
    bench.reset()
    return texts


def at_once(bench: Bench, jobs: Sequence[Job], sampling: Sampling = TEXT) -> list[str]:
    with ThreadPoolExecutor(len(jobs)) as pool:
        deltas = list(pool.map(lambda job: job.run(bench, sampling), jobs))
    for job, delta in zip(jobs, deltas, strict=True):
        job.check(delta)
    return [delta.text for delta in deltas]


def test_16_requests_at_once_give_the_texts_they_give_one_by_one(bench: Bench) -> None:
    jobs = mixed_jobs(bench, 16)
    assert at_once(bench, jobs) == one_by_one(bench, jobs)


def test_a_long_plain_prompt_in_chunks_and_blended_ones_share_steps(bench: Bench) -> None:
    long = Job(bench.prompt(bench.pieces[:20]), None)  # four steps' worth of tokens
    blended = [job for job in mixed_jobs(bench, 8) if job.recipe]
    jobs = [*blended[:2], long, *blended[2:]]
    assert at_once(bench, jobs) == one_by_one(bench, jobs)


def test_ingest_goes_on_beside_requests(bench: Bench, own_bench: Bench) -> None:
    jobs = mixed_jobs(bench, 6)
    alone = one_by_one(bench, jobs)
    with ThreadPoolExecutor(1) as pool:
        ingest = pool.submit(own_bench.ingest, own_bench.pieces)
        assert at_once(bench, jobs) == alone
        ingest.result()


@pytest.mark.parametrize("stage", ["early", "late"])
def test_preempted_requests_give_the_texts_of_undisturbed_ones(bench: Bench, stage: str) -> None:
    jobs = mixed_jobs(bench, 6)
    sampling = Sampling(max_tokens=16)
    alone = one_by_one(bench, jobs, sampling)
    streams = [bench.engine.stream(job.prompt.token_ids, sampling, job.recipe) for job in jobs]
    texts = ["" for _ in jobs]
    for _ in range(1 if stage == "early" else 6):
        for number, stream in enumerate(streams):
            texts[number] += next(stream).text
    bench.preempt_all()
    for number, stream in enumerate(streams):
        for delta in stream:
            texts[number] += delta.text
            jobs[number].check(delta)
    assert texts == alone


def test_requests_that_need_more_kv_than_there_is_all_end_right(bench: Bench) -> None:
    cache = bench.engine._llm.vllm_config.cache_config
    blocks = cache.num_gpu_blocks - 1  # vLLM keeps one
    count = 1 + blocks * cache.block_size // (bench.engine.max_model_len - 2 * cache.block_size)
    length = blocks // count * cache.block_size - 4  # they just fit; another block for each does not
    jobs = []
    for number in range(count):
        pieces = islice(cycle(bench.pieces), number, number + length // 98 - 1)
        prompt = bench.prompt(pieces)
        filling = (bench.pieces[number].token_ids * 3)[: length - len(prompt.token_ids)]
        jobs.append(Job(prompt.fresh(filling), bench.recipe(prompt, ratio=0.0)))
    assert {len(job.prompt.token_ids) for job in jobs} == {length}
    texts = at_once(bench, jobs)
    assert [texts[0], texts[-1]] == one_by_one(bench, [jobs[0], jobs[-1]])


def test_a_stopped_stream_frees_its_request(bench: Bench) -> None:
    prompt = bench.prompt(bench.pieces[:4])
    expected = bench.plain(prompt, TEXT).text
    for recipe in (None, bench.recipe(prompt)):
        stream = bench.engine.stream(prompt.token_ids, ENDLESS, recipe)
        next(stream), next(stream)
        stream.close()  # type: ignore[attr-defined]
        bench.reset()  # refused for as long as the request lives
    assert bench.engine.generate(prompt.token_ids, TEXT).text == expected


def test_20_stopped_streams_leave_no_kv_behind(bench: Bench) -> None:
    prompt = bench.prompt(bench.pieces[:20])
    for number in range(20):
        recipe = bench.recipe(prompt, 0.0, f"hkvd:check_layers=1+{number + 2}")  # KV of its own
        stream = bench.engine.stream(prompt.token_ids, ENDLESS, recipe)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
    bench.reset()
    assert bench.blended(prompt).report


def test_a_stream_stopped_before_its_first_token_frees_its_request(bench: Bench) -> None:
    prompt = bench.prompt(bench.pieces[:10])
    bench.reset()
    stream = bench.engine.stream(prompt.token_ids, ENDLESS, bench.recipe(prompt))
    task = asyncio.run_coroutine_threadsafe(asyncio.sleep(0.05), bench.engine._loop)
    del stream  # never begun: nothing was asked
    task.result()
    bench.reset()


async def ticking(work: Callable[[], asyncio.Task[str]]) -> tuple[str, int]:
    """The result of a task, and how often this loop came round meanwhile."""
    task, ticks = work(), 0
    while not task.done():
        await asyncio.sleep(0.01)
        ticks += 1
    return task.result(), ticks


async def test_agenerate_leaves_the_callers_loop_free(bench: Bench) -> None:
    prompt = bench.prompt(bench.pieces[:8])
    recipe = bench.recipe(prompt)

    async def ask() -> str:
        return (await bench.engine.agenerate(prompt.token_ids, TEXT, recipe)).text

    bench.reset()
    text, ticks = await ticking(lambda: asyncio.create_task(ask()))
    assert ticks >= 5
    assert text == bench.blended(prompt, TEXT).text


async def test_astream_leaves_the_callers_loop_free_and_comes_in_pieces(bench: Bench) -> None:
    prompt = bench.prompt(bench.pieces[:8])
    recipe = bench.recipe(prompt)
    pieces: list[Delta] = []

    async def ask() -> str:
        async for delta in bench.engine.astream(prompt.token_ids, TEXT, recipe):
            pieces.append(delta)
        return "".join(delta.text for delta in pieces)

    bench.reset()
    text, ticks = await ticking(lambda: asyncio.create_task(ask()))
    assert ticks >= 5 and len(pieces) > 5
    assert pieces[-1].report and pieces[-1].finish_reason == "length"
    assert text == bench.blended(prompt, TEXT).text


async def test_cancelling_a_task_stops_its_generation(bench: Bench) -> None:
    prompt = bench.prompt(bench.pieces[:4])
    await asyncio.to_thread(bench.reset)
    task = asyncio.create_task(bench.engine.agenerate(prompt.token_ids, ENDLESS, bench.recipe(prompt)))
    while bench.engine.reset_prefix_cache():  # until it runs
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(bench.reset)


async def test_leaving_astream_stops_its_generation(bench: Bench) -> None:
    prompt = bench.prompt(bench.pieces[:4])
    pieces = bench.engine.astream(prompt.token_ids, ENDLESS, bench.recipe(prompt))
    async with contextlib.aclosing(pieces):  # type: ignore[type-var]
        await anext(pieces)
        await anext(pieces)
    await asyncio.to_thread(bench.reset)
