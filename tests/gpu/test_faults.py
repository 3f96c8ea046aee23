"""What fails in a blend, or beside one, ends in what full prefill gives.

An answer is judged by the log probabilities along full prefill's own tokens: on a GPU, two orders of the same
sums may differ by what it takes to choose another token.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blendrag.engine.client.engine import Engine
from blendrag.engine.client.generation import Delta, Sampling
from blendrag.engine.wire.recipe import Recipe
from blendrag.lab.statistics import next_token_kl
from blendrag.serving.identity import kv_identity
from blendrag.settings import Settings
from blendrag.store.contexts import Chunk
from device import DEVICE
from tables import Tables
from workbench import Bench, Prompt, real_texts

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

MAX_KL = 0.02  # as `blendrag doctor` has it
TOKENS = 12  # of an answer
RIVALS = 8 if DEVICE == "cuda" else 3  # requests at once


@pytest.fixture
def bench(engine: Engine, tokenizer: Any, settings: Settings, tmp_path: Path) -> Iterator[Bench]:
    """Twelve chunks, read from disk at every use."""
    identity = kv_identity(settings, engine.model_path)
    pieces = [Chunk(identity.chunk_key(ids), "", ids) for ids in real_texts(tokenizer)][:12]
    opened = Bench(engine, tokenizer, identity, tmp_path / "kb", pieces).open(ram_bytes=0)
    yield opened
    with contextlib.suppress(Exception):  # a test may have closed it
        opened.close()


@pytest.fixture
def judge(tables: Tables) -> Callable[[str, Delta, Delta], None]:
    """Fails for another answer than full prefill's."""

    def compare(fault: str, full: Delta, other: Delta) -> None:
        pairs = zip(full.logprobs, other.logprobs, strict=True)
        worst = max(next_token_kl(own, its) for own, its in pairs)
        said = (other.report and other.report.problem) or ""
        tables.add(fault=fault, KL=f"{worst:.1e}", limit=f"{MAX_KL:g}", the_engine_says=said)
        assert worst <= MAX_KL

    return compare


def full(bench: Bench, prompt: Prompt) -> tuple[Delta, Sampling]:
    """Full prefill's answer, and how others are made to give the same tokens."""
    free = bench.plain(prompt, Sampling(max_tokens=TOKENS))
    forced = Sampling(forced=tuple(free.token_ids), logprobs=20)
    answer = bench.plain(prompt, forced)
    bench.reset()
    return answer, forced


def ask(bench: Bench, prompt: Prompt, sampling: Sampling, **options: Any) -> Delta:
    return bench.engine.generate(prompt.token_ids, sampling, bench.recipe(prompt, **options))


@pytest.mark.parametrize(
    ("fault", "options"),
    [
        ("nothing", {"ratio": 1.0}),
        ("unknown selector", {"selector": "best"}),
        ("check layer", {"selector": "hkvd:check_layers=x"}),
    ],
)
def test_recipe_that_cannot_be_followed_gives_full_prefills_answer(
    bench: Bench, judge: Callable[..., None], fault: str, options: dict[str, Any]
) -> None:
    prompt = bench.prompt(bench.pieces[:4])
    expected, forced = full(bench, prompt)
    found = ask(bench, prompt, forced, **options)
    judge(fault, expected, found)
    assert found.report and bool(found.report.fallback) == (fault != "nothing")


def test_store_that_is_not_open_gives_full_prefills_answer(bench: Bench, judge: Callable[..., None]) -> None:
    prompt = bench.prompt(bench.pieces[:4])
    expected, forced = full(bench, prompt)
    recipe = replace(bench.recipe(prompt), store="nowhere")
    found = bench.engine.generate(prompt.token_ids, forced, recipe)
    judge("no such store", expected, found)
    assert found.report and found.report.fallback


@pytest.mark.parametrize("harm", ["flipped bit", "cut short", "gone"])
def test_record_that_cannot_be_read_gives_full_prefills_answer(
    bench: Bench, judge: Callable[..., None], harm: str
) -> None:
    hurt = bench.pieces[2]
    prompt = bench.prompt(bench.pieces[:4])
    expected, forced = full(bench, prompt)
    (file,) = Path(bench.root).rglob(f"{hurt.key}*")
    record = bytearray(file.read_bytes())
    record[len(record) // 2] ^= 1
    if harm == "gone":
        file.unlink()
    else:
        file.write_bytes(record if harm == "flipped bit" else record[: len(record) // 2])
    missed = ask(bench, prompt, forced, ratio=0.0)  # at ratio 1 the layers above the check are not even read
    assert missed.report and list(missed.report.missing) == [hurt.key]
    bench.reset()
    judge(f"record, {harm}", expected, ask(bench, prompt, forced, ratio=1.0))


def test_failure_behind_a_prefix_hit_gives_full_prefills_answer(
    bench: Bench, judge: Callable[..., None]
) -> None:
    """The recipe is the same, and the tokens up to what stands between the chunks."""

    def divided_by(number: int) -> Prompt:
        prompt = bench.prompt(bench.pieces[:2]).fresh(bench.pieces[number].token_ids)
        for piece in bench.pieces[2:6]:  # enough for a blend
            prompt = prompt.cached(piece)
        return prompt.fresh(bench.encode("\nIn short, they are"))

    one, two = divided_by(8), divided_by(9)
    expected, forced = full(bench, two)
    ask(bench, one, forced, selector="best")
    found = ask(bench, two, forced, selector="best")
    judge("behind a prefix hit", expected, found)
    assert found.report and found.report.fallback and found.report.prefix


def test_requests_beside_each_other_give_full_prefills_answers(
    bench: Bench, judge: Callable[..., None]
) -> None:
    """Plain, blended, and failing, at once: what one of them does to a step reaches all that are in it."""
    prompts = [bench.prompt(bench.pieces[number : number + 1 + number % 4]) for number in range(RIVALS)]
    recipes: list[Callable[[Prompt], Recipe | None]] = [
        lambda prompt: None,
        lambda prompt: bench.recipe(prompt, ratio=1.0),
        lambda prompt: bench.recipe(prompt, selector="best"),
    ]
    answers = [full(bench, prompt) for prompt in prompts]

    def one(number: int) -> Delta:
        recipe = recipes[number % len(recipes)](prompts[number])
        return bench.engine.generate(prompts[number].token_ids, answers[number][1], recipe)

    with ThreadPoolExecutor(RIVALS) as pool:
        found = list(pool.map(one, range(RIVALS)))
    for (expected, _), answer in zip(answers, found, strict=True):
        judge(f"{RIVALS} at once", expected, answer)


def test_request_that_loses_its_kv_gives_full_prefills_answer(
    bench: Bench, judge: Callable[..., None]
) -> None:
    prompt = bench.prompt(bench.pieces[:4])
    expected, forced = full(bench, prompt)
    stream = bench.engine.stream(prompt.token_ids, forced, bench.recipe(prompt, ratio=1.0))
    whole = next(stream)
    bench.preempt_all()
    for delta in stream:
        whole = whole.joined(delta)
    judge("preempted", expected, whole)


def test_request_that_is_given_up_gives_its_blocks_back_and_spoils_nothing(
    bench: Bench, judge: Callable[..., None]
) -> None:
    prompt = bench.prompt(bench.pieces)
    expected, forced = full(bench, prompt)

    async def give_up(seconds: float) -> None:
        recipe = bench.recipe(prompt, ratio=0.5)
        task = asyncio.create_task(bench.engine.agenerate(prompt.token_ids, forced, recipe))
        await asyncio.sleep(seconds)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    for number in range(8):  # before it is blended, meanwhile, and after, however fast the device is
        asyncio.run(give_up(2.0**number / 1000))
    bench.reset()  # fails while any request holds KV
    judge("given up", expected, ask(bench, prompt, forced, ratio=1.0))
