"""Models that have layers with windows, in the memory that vLLM gives them: prompts of several windows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blendrag.engine.client.engine import Engine
from blendrag.engine.client.generation import Delta, Sampling
from blendrag.serving.identity import kv_identity
from blendrag.settings import Settings
from blendrag.store.contexts import Chunk
from model_shapes import SHAPES
from workbench import CHUNK_TOKENS, Bench, Prompt, distance

pytestmark = [pytest.mark.own_engine, pytest.mark.nightly]

TEXT = Sampling(max_tokens=8, logprobs=20, other={"ignore_eos": True})
KINDS = ["Gemma 3", "gpt-oss", "Mistral 0.1", "Gemma 4 without images", "Gemma 4 E2B, E4B"]
STEP = 256  # tokens that a step computes at most
CLOSE = 1e-4  # float32, two orders of the same sums


def settings_of(title: str, folder: Path, tokenizer: Any, **arguments: Any) -> Settings:
    (shape,) = (each for each in SHAPES if each.title == title)
    made = replace(shape, reader=None).settings(folder, tokenizer)  # texts alone
    arguments = {**made.engine_args, "max_num_batched_tokens": STEP, **arguments}
    return made.model_copy(update={"dtype": "float32", "max_model_len": 2048, "engine_args": arguments})


def open_bench(settings: Settings, folder: Path, tokenizer: Any) -> Bench:
    """A dozen chunks of random tokens, on an engine of its own."""
    identity = kv_identity(settings, Path(settings.model))
    generator = torch.Generator().manual_seed(3)
    texts = torch.randint(100, 40_000, (12, CHUNK_TOKENS), generator=generator).tolist()
    pieces = [Chunk(identity.chunk_key(tuple(ids)), "", tuple(ids)) for ids in texts]
    return Bench(Engine.shared(settings), tokenizer, identity, folder, pieces).open()


def close(bench: Bench) -> None:
    bench.close()
    bench.engine.release()


def test_what_is_reused_does_not_hang_on_how_vllm_keeps_it(tmp_path: Path, tokenizer: Any) -> None:
    """One group of layers, all KV of which is there, says the same. First of all, before another engine is
    there."""
    found: list[list[Delta]] = []
    for number, arguments in enumerate(({}, {"disable_hybrid_kv_cache_manager": True})):
        settings = settings_of("Gemma 3", tmp_path, tokenizer, **arguments)
        bench = open_bench(settings, tmp_path / f"kb{number}", tokenizer)
        try:
            assert bool(bench.engine.facts.blocks) == bool(arguments)
            prompt = bench.prompt(bench.pieces[:10])
            kinds = (
                {"ratio": 0.0},
                {"ratio": 0.15, "selector": "query"},
                {"ratio": 0.3, "selector": "gradual"},
            )
            found.append([bench.blended(prompt, TEXT, **options) for options in kinds])
        finally:
            close(bench)
    for of_groups, of_one in zip(*found, strict=True):
        assert of_groups.token_ids == of_one.token_ids and distance(of_groups, of_one) < CLOSE


@pytest.mark.parametrize("title", ["gpt-oss", "Gemma 4 E2B, E4B"])
def test_drafts_change_no_blended_answer(tmp_path: Path, tokenizer: Any, title: str) -> None:
    longer = replace(TEXT, max_tokens=32, logprobs=None)
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
    found = list[list[Delta]]()
    for number, arguments in enumerate(({}, {"speculative_config": drafts})):
        bench = open_bench(
            settings_of(title, tmp_path, tokenizer, **arguments), tmp_path / str(number), tokenizer
        )
        try:
            prompt = bench.prompt(bench.pieces[:10])
            found.append([bench.blended(prompt, longer, ratio=ratio) for ratio in (0.0, 0.15, 1.0)])
        finally:
            close(bench)
    plainly, drafted = found
    assert all(each.report and not each.report.fallback for each in drafted)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plainly]


@pytest.fixture(scope="module", params=KINDS)
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tokenizer: Any
) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("windows")
    made = open_bench(settings_of(request.param, folder, tokenizer), folder / "kb", tokenizer)
    yield made
    close(made)


@pytest.mark.parametrize("selector", ["hkvd", "query"])
def test_recomputing_every_token_gives_full_prefills_answer(bench: Bench, selector: str) -> None:
    prompt = bench.prompt(bench.pieces[:10])
    full, blended = bench.plain(prompt, TEXT), bench.blended(prompt, TEXT, ratio=1.0, selector=selector)
    assert blended.report and blended.report.recomputed == blended.report.cached == 10 * CHUNK_TOKENS
    assert blended.token_ids == full.token_ids and distance(full, blended) < CLOSE


@pytest.mark.parametrize("options", [{"ratio": 0.0}, {"ratio": 0.15, "selector": "query"}])
def test_same_prompt_again_has_the_same_answer_from_the_prefix_cache(
    bench: Bench, options: dict[str, Any]
) -> None:
    """vLLM finds the last window there, and what it decodes reads that."""
    prompt = bench.prompt(bench.pieces[:3])  # one tile of its keys, with little L2, too
    first = bench.blended(prompt, TEXT, **options)
    again = bench.engine.generate(prompt.token_ids, TEXT, bench.recipe(prompt, **options))
    assert again.report is None and again.prefix_tokens > 2 * CHUNK_TOKENS
    assert (again.token_ids, again.logprobs) == (first.token_ids, first.logprobs)


def test_long_question_is_prefilled_in_steps_behind_blended_windows(bench: Bench) -> None:
    tail = torch.randint(100, 40_000, (2 * STEP,), generator=torch.Generator().manual_seed(4)).tolist()
    prompt = bench.prompt(bench.pieces[:10]).fresh(tail)
    full, blended = bench.plain(prompt, TEXT), bench.blended(prompt, TEXT, ratio=1.0)
    assert blended.token_ids == full.token_ids and distance(full, blended) < CLOSE


@dataclass(frozen=True, slots=True)
class Turns:
    """Two prompts, the second of which goes on from the first."""

    first: Prompt
    second: Prompt

    @classmethod
    def of(cls, bench: Bench) -> Turns:
        first = bench.prompt(bench.pieces[:3])
        second = first
        for piece in bench.pieces[3:11]:
            second = second.cached(piece).fresh(bench.encode("\n\n"))
        return cls(first, second.fresh(bench.encode("In short, they are")))

    def ask(self, bench: Bench, ratio: float) -> Delta:
        bench.blended(self.first, TEXT, ratio=ratio)
        return bench.engine.generate(self.second.token_ids, TEXT, bench.recipe(self.second, ratio=ratio))


def test_next_turn_is_blended_anew_where_that_computes_less(bench: Bench) -> None:
    turns = Turns.of(bench)
    expected = bench.blended(turns.second, TEXT, ratio=0.0)
    found = turns.ask(bench, 0.0)
    assert found.report is not None and not found.report.fallback
    assert found.report.cached == 11 * CHUNK_TOKENS and found.report.prefix == 0
    assert found.token_ids == expected.token_ids and distance(expected, found) < CLOSE


def test_next_turn_is_left_to_the_engine_where_blending_computes_as_much(bench: Bench) -> None:
    turns = Turns.of(bench)
    full, found = bench.plain(turns.second, TEXT), turns.ask(bench, 1.0)
    assert found.report is None and found.prefix_tokens > 2 * CHUNK_TOKENS, "that of the first turn"
    assert found.token_ids == full.token_ids and distance(full, found) < CLOSE


def test_failed_blend_gives_full_prefills_answer(bench: Bench) -> None:
    prompt = bench.prompt(bench.pieces[:10])
    full = bench.plain(prompt, TEXT)
    bench.reset()
    recipe = replace(bench.recipe(prompt), store="there is none")
    found = bench.engine.generate(prompt.token_ids, TEXT, recipe)
    assert found.report is not None and found.report.fallback
    assert (found.token_ids, found.logprobs) == (full.token_ids, full.logprobs)
