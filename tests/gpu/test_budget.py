"""Answers from a part of their prompt's KV, on each attention backend that reads by heads, beside others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from blendrag.compress import make_budget
from blendrag.engine.client.generation import Delta, Sampling
from blendrag.lab.running import lab_engine
from blendrag.lab.statistics import next_token_kl
from blendrag.serving.identity import kv_identity
from blendrag.settings import Settings
from blendrag.store.contexts import Chunk
from device import DEVICE
from tables import Tables
from workbench import Bench, Prompt, real_texts

pytestmark = [
    pytest.mark.own_engine,
    pytest.mark.nightly,
    pytest.mark.xdist_group("kv-budget"),
]

BACKENDS = ("FLASH_ATTN", "TRITON_ATTN") if DEVICE == "cuda" else ("CPU_ATTN",)
BUDGET = 256
MAX_KL = 0.02  # as `blendrag doctor` has it
TEXT = Sampling(max_tokens=40, logprobs=20, other={"ignore_eos": True})
Judge = Callable[[str, Delta, Delta], float]


@pytest.fixture(scope="module", params=BACKENDS)
def bench(
    request: pytest.FixtureRequest,
    engine_options: dict[str, Any],
    tokenizer: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Bench]:
    """With piecewise graphs, where there are graphs."""
    own = {"attention_backend": request.param} if DEVICE == "cuda" else {}
    arguments = engine_options.get("engine_args", {}) | own
    settings = Settings.load(**engine_options | {"kv_budget": BUDGET, "engine_args": arguments})
    engine = lab_engine(settings)
    identity = kv_identity(settings, engine.model_path)
    pieces = [Chunk(identity.chunk_key(ids), "", ids) for ids in real_texts(tokenizer)][:20]
    opened = Bench(engine, tokenizer, identity, tmp_path_factory.mktemp("kb"), pieces).open()
    yield opened
    opened.close()
    engine.release()


@pytest.fixture
def judge(request: pytest.FixtureRequest, tables: Tables) -> Judge:
    """The largest divergence of a token along the same answer, for the table."""
    backend = request.node.callspec.params["bench"]

    def compare(read: str, whole: Delta, other: Delta) -> float:
        worst = max(map(next_token_kl, whole.logprobs, other.logprobs))
        freed = str(other.report.kv_freed) if other.report else ""
        tables.add(backend=backend, read=read, KL=f"{worst:.1e}", freed=freed)
        return worst

    return compare


def generate(bench: Bench, prompt: Prompt, sampling: Sampling, **options: Any) -> Delta:
    bench.reset()
    recipe = bench.recipe(prompt, selector="query", **options)
    return bench.engine.generate(prompt.token_ids, sampling, recipe)


def forced(answer: Delta) -> Sampling:
    """The same tokens again, with their log probabilities."""
    return replace(TEXT, forced=tuple(answer.token_ids))


def test_first_token_is_the_same_and_blocks_are_freed(bench: Bench, judge: Judge) -> None:
    prompt, size = bench.prompt(bench.pieces), bench.engine.facts.block_size
    whole, evicted = (generate(bench, prompt, TEXT, **options) for options in ({}, {"kv_budget": BUDGET}))
    assert evicted.report is not None and not evicted.report.kv_whole
    assert evicted.report.kv_freed == (len(prompt.token_ids) - 1) // size - (BUDGET // size - 1)
    first, other = (replace(answer, logprobs=answer.logprobs[:1]) for answer in (whole, evicted))
    assert evicted.token_ids[0] == whole.token_ids[0] and judge("first token", first, other) <= MAX_KL
    assert bench.blended(prompt).report, "no block is held"


def test_answer_from_nearly_all_kv_is_close_and_from_the_least_is_not(bench: Bench, judge: Judge) -> None:
    prompt, size = bench.prompt(bench.pieces), bench.engine.facts.block_size
    whole = generate(bench, prompt, TEXT)
    again = generate(bench, prompt, forced(whole))
    nearly, least = len(prompt.token_ids) // size * size - size, make_budget(1).least(size)
    error = {
        read: judge(read, again, generate(bench, prompt, forced(whole), **options))
        for read, options in {
            "nearly all": {"kv_budget": nearly},
            "window": {"kv_budget": BUDGET},
            "least": {"kv_budget": least},
        }.items()
    }
    assert error["nearly all"] <= MAX_KL < error["least"]
    assert error["nearly all"] < error["window"] < error["least"]


def test_requests_beside_an_evicted_one_read_their_own_kv(bench: Bench, judge: Judge) -> None:
    """Nothing of theirs is dropped, and all of it is read by heads: a prompt, and an answer."""
    evicted, other = bench.prompt(bench.pieces), bench.prompt(bench.pieces[:4])
    alone = bench.plain(other, TEXT)
    whole = bench.plain(other, forced(alone))
    bench.reset()
    recipe = bench.recipe(evicted, selector="query", kv_budget=BUDGET)
    longer = replace(TEXT, max_tokens=4 * TEXT.max_tokens)
    stream = bench.engine.stream(evicted.token_ids, longer, recipe)
    for _ in range(3):
        next(stream)
    beside = bench.engine.generate(other.token_ids, forced(alone))
    last = list(stream)[-1]
    assert last.report is not None and last.report.kv_freed
    assert judge("beside an evicted one", whole, beside) <= MAX_KL
