"""Time to the first token: all arms on the same prompts, in turn, in one process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blendrag.engine.client.engine import Engine
from blendrag.errors import ConfigError, PromptTooLongError
from blendrag.lab.arms import Arm, Sample, make_arms, recipe_of
from blendrag.lab.bench.ingest import fill, rounds_of, temporary_store
from blendrag.lab.progress import BenchProgress
from blendrag.lab.prompts import Prompt, PromptMaker, Trial
from blendrag.lab.running import blending_engine
from blendrag.lab.statistics import summarise
from blendrag.lab.texts import cut_chunks, file_texts, installed_texts
from blendrag.machine import describe_machine
from blendrag.prompt import encode_document
from blendrag.select import make_selector
from blendrag.settings import Settings

POOL = 4  # chunks in the store, per chunk of a prompt


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What is measured. ``data``: a text or JSONL file instead of the built-in text."""

    chunks: int = 6
    chunk_tokens: int = 512
    repeats: int = 5
    ratios: tuple[float, ...] = (0.05, 0.15, 0.3)
    data: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.chunks < 2:
            raise ConfigError(f"--chunks must be at least 2, not {self.chunks}: one has no other order")
        if self.chunk_tokens < 1 or self.repeats < 1:
            raise ConfigError("--chunk-tokens and --repeats must be at least 1")


def read_ratio(word: str) -> float:
    """``"0.15"`` as a number. Raises ValueError, saying what is wrong."""
    try:
        ratio = round(float(word), 6)
    except ValueError:
        raise ValueError(f"{word.strip()!r} is not a number") from None
    if not 0.0 < ratio <= 1.0:
        raise ValueError(f"{ratio:g} is not above 0 and at most 1 (0 is the arm 'reuse')")
    return ratio


def parse_ratios(text: str) -> tuple[float, ...]:
    """``"0.05,0.15"`` as numbers, each once. Raises ConfigError, naming what is wrong."""
    try:
        return tuple(dict.fromkeys(map(read_ratio, text.split(","))))
    except ValueError as error:
        raise ConfigError(f"--ratios: {error}") from None


def run_ttft(settings: Settings, options: BenchOptions, progress: BenchProgress) -> dict[str, Any]:
    """Measure; the results, JSON-able:

    arms: per arm (full, prefix, reuse, blend@RATIO) what ``statistics.summarise`` says.
    machine: what it ran on. ingest: tokens per second, alone and next to plain prefill. config: the options.

    Raises ConfigError, SourceError, ModelError, PromptTooLongError, StoreFullError, EngineError.
    """
    make_selector(settings.blending)  # what is wrong is told before the long start
    texts = file_texts(options.data) if options.data else None
    with blending_engine(settings, progress) as engine:
        return _measure(engine, settings, options, texts, progress)


def _measure(
    engine: Engine,
    settings: Settings,
    options: BenchOptions,
    texts: list[str] | None,
    progress: BenchProgress,
) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(engine.model_path))
    progress.note("cutting text into chunks")
    pieces = cut_chunks(
        installed_texts() if texts is None else texts,
        lambda text: encode_document(tokenizer, text),
        options.chunk_tokens,
        least=options.chunks,
        most=POOL * options.chunks,
    )
    maker = PromptMaker(tokenizer, system_prompt=settings.system_prompt, separator=settings.separator)
    with temporary_store(engine, settings, pieces) as store:
        rng = random.Random(options.seed)
        trials = [
            maker.trial(store.chunks, options.chunks, rng, number) for number in range(options.repeats + 1)
        ]
        check_length(trials, engine.max_model_len)
        arms = make_arms(recipe_of(settings, store.id), options.ratios)
        rounds = rounds_of(store.chunks, settings.ingest_batch_tokens)
        progress.total(2 * len(rounds) + len(arms) * len(trials))
        cost = fill(engine, store, rounds, progress)
        samples = _interleaved(engine, arms, trials, progress)
    return {
        "arms": summarise(samples),
        "machine": describe_machine(settings.model, engine.facts),
        "ingest": cost.to_dict(),
        "config": asdict(options)
        | {
            "data": str(options.data) if options.data else None,
            "prompt_tokens": [len(trial.prompt.token_ids) for trial in trials[1:]],
            "pool_chunks": len(pieces),
            "selector": settings.selector,
            "metric": settings.metric,
            "check_layers": list(settings.check_layers),
            "threshold": settings.threshold,
            "mask": engine.facts["mask"],
            "ram_bytes": settings.ram_bytes,
        },
    }


def check_length(trials: Sequence[Trial], window: int) -> None:
    """Raise PromptTooLongError unless every prompt fits into the model's window."""
    check_prompts([trial.prompt for trial in trials], window)


def check_prompts(prompts: Sequence[Prompt], window: int, answer: int = 1) -> None:
    """``check_length``, with room for ``answer`` tokens."""
    longest = max(len(prompt.token_ids) for prompt in prompts)
    if longest + answer > window:
        raise PromptTooLongError(
            f"the prompts have up to {longest} tokens, the model's window {window}:"
            " ask for fewer or smaller chunks, or use a model with a longer window"
        )


def _interleaved(
    engine: Engine, arms: Sequence[Arm], trials: Sequence[Trial], progress: BenchProgress
) -> dict[str, list[Sample]]:
    """Samples per arm. The first trial is the warm-up; each later one begins with another arm."""
    samples: dict[str, list[Sample]] = {arm.name: [] for arm in arms}
    for number, trial in enumerate(trials):
        shift = number % len(arms)
        for arm in (*arms[shift:], *arms[:shift]):
            what = f"repeat {number} of {len(trials) - 1}" if number else "warm-up"
            progress.note(f"{what}: {arm.name}")
            sample = arm.run(engine, trial)
            if number:
                samples[arm.name].append(sample)
            progress.step()
    return samples
