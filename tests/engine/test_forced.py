"""Forced decoding: what is generated is what was given, and its log probabilities are the model's own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from blendrag.engine.client.engine import Engine
from blendrag.engine.client.generation import Delta, Sampling
from blendrag.errors import ConfigError
from workbench import Bench

pytestmark = pytest.mark.engine

GOLD = " a cache of keys and values.\n\nSo it ends here."


def test_forced_logprobs_are_those_of_transformers(bench: Bench, model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    prompt, gold = bench.prompt(bench.pieces[:3]), bench.encode(GOLD)
    forced = bench.plain(prompt, Sampling(forced=gold, logprobs=20))
    assert tuple(forced.token_ids) == gold and forced.finish_reason == "length"
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt.token_ids, *gold]])).logits[0]
    expected = logits[len(prompt.token_ids) - 1 : -1].log_softmax(-1)
    for row, token, told in zip(expected, gold, forced.logprobs, strict=True):
        top = row.topk(20)
        assert told.keys() == {token, *top.indices.tolist()}
        assert all(told[other] == pytest.approx(float(row[other]), abs=2e-3) for other in told)


def test_forcing_what_is_generated_anyway_changes_nothing(bench: Bench) -> None:
    prompt = bench.prompt(bench.pieces[:2])
    free = bench.plain(prompt, Sampling(max_tokens=6, logprobs=20))
    forced = bench.plain(prompt, Sampling(forced=tuple(free.token_ids), logprobs=20))
    assert forced.text == free.text
    for one, other in zip(free.logprobs, forced.logprobs, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_blended_request_is_forced_and_no_other_in_its_batch(bench: Bench) -> None:
    """Long and short, forced and free, at once: rows are added, removed and moved while others go on."""
    prompt = bench.prompt(bench.pieces[:4])
    other = bench.prompt(bench.pieces[4:6])
    free = bench.plain(other, Sampling(max_tokens=12))
    golds = [bench.encode(GOLD)[:n] for n in (3, 9, 5)]
    alone = [bench.blended(prompt, Sampling(forced=gold), ratio=0.25) for gold in golds]
    bench.reset()

    async def blended(number: int) -> Delta:  # a namespace each: a hit in the prefix cache is no blend
        recipe, sampling = bench.recipe(prompt, ratio=0.25), Sampling(forced=golds[number])
        return await bench.engine.agenerate(prompt.token_ids, sampling, recipe, f"{number}")

    async def together() -> list[Delta]:
        free_one = bench.engine.agenerate(other.token_ids, Sampling(max_tokens=12))
        return await asyncio.gather(blended(0), free_one, blended(1), blended(2))

    first, beside, second, third = asyncio.run(together())
    assert beside.text == free.text
    for gold, one, batched in zip(golds, alone, (first, second, third), strict=True):
        assert tuple(batched.token_ids) == gold
        for told, expected, token in zip(batched.logprobs, one.logprobs, gold, strict=True):
            assert told[token] == pytest.approx(expected[token], abs=2e-3)


def test_end_of_text_can_be_forced_and_does_not_end_it(bench: Bench) -> None:
    stop = (bench.tokenizer.eos_token_id, *bench.encode(" again"))
    forced = bench.plain(bench.prompt(bench.pieces[:2]), Sampling(forced=stop, stop=("again",)))
    assert tuple(forced.token_ids) == stop


@pytest.mark.parametrize("token", ["12", 1.5, -1, True])
def test_bad_forced_token_is_refused_before_it_reaches_the_engine(engine: Engine, token: Any) -> None:
    with pytest.raises(ConfigError, match="token ids"):
        engine.generate([1, 2, 3], Sampling(forced=(token,)))


def test_token_beyond_the_vocabulary_forces_nothing(engine: Engine) -> None:
    free = engine.generate([1, 2, 3], Sampling(max_tokens=1))
    assert engine.generate([1, 2, 3], Sampling(forced=(10**9,))).token_ids == free.token_ids
