"""A stream of novel questions over more chunks than memory holds: does the speed-up last?"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

from blendrag.engine.client.engine import Engine
from blendrag.errors import ConfigError
from blendrag.lab.arms import Blending, FullPrefill, Sample, recipe_of
from blendrag.lab.bench.ingest import fill, rounds_of, temporary_store
from blendrag.lab.progress import BenchProgress
from blendrag.lab.prompts import PromptMaker
from blendrag.lab.running import blending_engine
from blendrag.lab.statistics import spread
from blendrag.lab.texts import text_pieces
from blendrag.machine import describe_machine
from blendrag.settings import Settings

_QUARTERS = 4


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What is measured. more: chunks in the store, per chunk that the RAM tier holds. full_every: a question
    in so many is asked by full prefill too."""

    questions: int = 80
    chunks: int = 4
    chunk_tokens: int = 256
    pool: int = 120
    more: int = 10
    ratio: float = 0.15
    full_every: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.questions < _QUARTERS * self.full_every:
            raise ConfigError(f"--questions must be at least {_QUARTERS * self.full_every}")


def run_stream(settings: Settings, options: StreamOptions, progress: BenchProgress) -> dict[str, Any]:
    """Ask; the results, JSON-able:

    questions: per question its TTFT and, where it was asked, that of full prefill, in ms, and the tiers its
    chunks came from. quarters: per quarter of the stream the spread of the speed-up. decay: last / first.
    stored: chunks in the store before and after. Every prompt combines chunks in a way not seen before.
    """
    with blending_engine(settings, progress) as engine:
        return _measure(engine, settings, options, progress)


def _measure(
    engine: Engine, settings: Settings, options: StreamOptions, progress: BenchProgress
) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(engine.model_path))
    pieces = text_pieces(tokenizer, options.pool, options.chunk_tokens)
    maker = PromptMaker(tokenizer, system_prompt=settings.system_prompt, separator=settings.separator)
    small = settings.model_copy(update={"ram_bytes": _ram_bytes(engine, options)})
    with temporary_store(engine, small, pieces) as store:
        rounds = rounds_of(store.chunks, settings.ingest_batch_tokens)
        progress.total(2 * len(rounds) + options.questions + 2)
        fill(engine, store, rounds, progress)
        before = store.store.stats().tiers
        full = FullPrefill()
        blend = Blending(recipe_of(settings, store.id, options.ratio))
        rng, asked = random.Random(options.seed), []
        seen: set[tuple[str, ...]] = set()
        for number in range(-2, options.questions):  # the first two warm up
            trial = maker.trial(store.chunks, options.chunks, rng, max(0, number))
            combination = tuple(sorted(key for key, _, _ in trial.prompt.spans))
            progress.note(f"question {number + 1} of {options.questions}")
            reference = full.run(engine, trial) if number % options.full_every == 0 else None
            sample = blend.run(engine, trial)
            if number >= 0 and combination not in seen:
                asked.append(_row(sample, reference, blend.report.tiers))
            seen.add(combination)
            progress.step()
        after = store.store.stats().tiers
    quarters = [_speed_up(part) for part in _cut(asked)]
    return {
        "questions": asked,
        "quarters": quarters,
        "decay": quarters[-1]["median"] / quarters[0]["median"],
        "stored": {"before": before["disk"]["chunks"], "after": after["disk"]["chunks"]},
        "tiers": after,
        "machine": describe_machine(settings.model, engine.facts),
        "config": asdict(options) | {"ram_bytes": small.ram_bytes},
    }


def _ram_bytes(engine: Engine, options: StreamOptions) -> int:
    """Room for one chunk in ``more``."""
    facts = engine.facts
    item = 4 if facts["dtype"] == "float32" else 2
    token = 2 * facts["num_layers"] * facts["num_kv_heads"] * facts["head_size"] * item
    return (token + 8) * options.chunk_tokens * options.pool // options.more


def _row(sample: Sample, reference: Sample | None, tiers: dict[str, int]) -> dict[str, Any]:
    return {
        "ttft_ms": sample.ttft_ms,
        "full_ms": None if reference is None else reference.ttft_ms,
        "tiers": tiers,
    }


def _cut(asked: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    size = len(asked) // _QUARTERS
    return [asked[at * size : (at + 1) * size] for at in range(_QUARTERS)]


def _speed_up(part: list[dict[str, Any]]) -> dict[str, float]:
    """Of the questions that were asked both ways, one after the other."""
    return spread([row["full_ms"] / row["ttft_ms"] for row in part if row["full_ms"] is not None])
