"""Where the answer is known: full prefill at one end, full reuse at the other, less error in between."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from blendrag.engine.client.generation import Sampling
from workbench import Bench, Prompt, distance, divergence

pytestmark = pytest.mark.engine

# float32, two orders of the same sums.
CLOSE = 2e-3
TEXT = Sampling(max_tokens=16, logprobs=20)


@pytest.mark.parametrize(
    "options",
    [{"ratio": 1.0}, *({"ratio": 0.999, "selector": name} for name in ("hkvd", "hkvd:metric=kv", "query"))],
)
def test_recomputing_every_token_gives_full_prefills_answer(bench: Bench, options: dict[str, Any]) -> None:
    prompt = bench.prompt(bench.pieces[:5])  # 0.999 of them rounds to all, chosen at the check layer
    full, blended = bench.plain(prompt, TEXT), bench.blended(prompt, TEXT, **options)
    assert blended.report and blended.report.recomputed == blended.report.cached == 5 * 96
    assert distance(full, blended) < CLOSE
    assert blended.token_ids == full.token_ids
    assert blended.text == full.text


def test_recomputing_nothing_gives_what_a_reference_implementation_of_reuse_gives(
    bench: Bench, model_dir: Path
) -> None:
    prompt = bench.prompt(bench.pieces[5:9])
    reused = bench.blended(prompt, ratio=0.0)
    assert reused.report and reused.report.recomputed == 0
    reference = _full_reuse(model_dir, prompt)
    for token, logprob in reused.logprobs[0].items():
        assert float(reference[token]) == pytest.approx(logprob, abs=CLOSE)
    assert distance(bench.plain(prompt), reused) > 10 * CLOSE  # the comparison can tell the two apart


def _full_reuse(model_dir: Path, prompt: Prompt) -> torch.Tensor:
    """First-token log probabilities when every chunk was prefilled alone, by transformers: no code shared."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    past = DynamicCache()
    logits = torch.empty(0)

    def forward(start: int, ids: Sequence[int], cache: DynamicCache) -> torch.Tensor:
        positions = torch.arange(start, start + len(ids))[None]
        out = model(torch.tensor([ids]), position_ids=positions, past_key_values=cache, use_cache=True)
        return out.logits[0, -1]

    at = 0
    with torch.inference_mode():
        for _, start, length in (*prompt.spans, ("", len(prompt.token_ids), 0)):
            if at < start:
                logits = forward(at, prompt.token_ids[at:start], past)
            if length:
                alone = DynamicCache()
                forward(start, prompt.token_ids[start : start + length], alone)
                for layer, kv in enumerate(alone.layers):
                    past.update(kv.keys, kv.values, layer)
            at = start + length
    return torch.log_softmax(logits, -1)


@pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0])
def test_one_chunk_at_position_0_is_plain_prefix_reuse_at_any_ratio(bench: Bench, ratio: float) -> None:
    prompt = Prompt().cached(bench.pieces[3]).fresh(bench.encode("\n\nThe package is"))
    full, blended = bench.plain(prompt, TEXT), bench.blended(prompt, TEXT, ratio=ratio)
    assert distance(full, blended) < CLOSE
    assert blended.token_ids == full.token_ids


def test_divergence_from_full_prefill_falls_with_the_ratio(bench: Bench) -> None:
    ratios = (0.0, 0.15, 0.5, 1.0)
    sums = dict.fromkeys(ratios, 0.0)
    count = 6
    for number in range(count):
        pieces = [bench.pieces[(5 * number + 7 * i) % len(bench.pieces)] for i in range(4)]
        prompt = bench.prompt(pieces)
        full = bench.plain(prompt)
        for ratio in ratios:
            sums[ratio] += divergence(full, bench.blended(prompt, ratio=ratio)) / count
    means = [sums[ratio] for ratio in ratios]
    assert all(later <= earlier + 0.005 for earlier, later in itertools.pairwise(means)), means
    assert means[-1] < 1e-4 < means[0], means


def test_threshold_recomputes_less_than_its_cap_when_little_deviates(bench: Bench) -> None:
    prompt = bench.prompt(bench.pieces[:4])
    cap = bench.blended(prompt, ratio=0.5).report
    some = bench.blended(prompt, ratio=0.5, selector="hkvd:threshold=0.2").report
    none = bench.blended(prompt, ratio=0.5, selector="hkvd:threshold=1e6")
    assert cap and some and none.report
    assert 0 < some.recomputed < cap.recomputed
    assert none.report.recomputed == 0
    every = bench.blended(prompt, ratio=1.0, selector="hkvd:threshold=0").report
    assert every and every.recomputed > cap.recomputed
