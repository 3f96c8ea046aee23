"""``blendrag eval``: all arms on the same questions, in turn, on one engine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

import blendrag
from blendrag.compress import check_budget, make_budget
from blendrag.errors import PromptTooLongError
from blendrag.lab.evaluate.arms import ArmSpec
from blendrag.lab.evaluate.decoding import summarise_decoding
from blendrag.lab.evaluate.formats import Format, find_format, read_questions
from blendrag.lab.evaluate.measure import Measuring
from blendrag.lab.evaluate.recommend import DEFAULT_TOLERANCE, recommend
from blendrag.lab.evaluate.report import Evaluation
from blendrag.lab.evaluate.samples import SampleLog
from blendrag.lab.evaluate.summary import summarise
from blendrag.lab.running import blending_engine
from blendrag.machine import commit, cores, cpu, installed_vllm
from blendrag.progress import Progress
from blendrag.settings import PREFIX_CACHING, Settings


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """Options of an evaluation. limit: questions asked, None for all. max_tokens: of a free answer. rows:
    file of the samples, with which an interrupted run goes on; None keeps them in memory."""

    data: Path
    format: str
    arms: tuple[ArmSpec, ...]
    limit: int | None = None
    seed: int = 0
    tolerance: float = DEFAULT_TOLERANCE
    max_tokens: int = 24
    rows: Path | None = None


def run_eval(settings: Settings, options: EvalOptions, progress: Progress) -> Evaluation:
    """Measure what is not measured yet.

    What is wrong with the options is told before the engine starts: SourceError, ConfigError. Also raises
    ModelError, PromptTooLongError if no prompt fits, StoreFullError,
    EngineError.
    """
    format = find_format(options.format)
    questions = read_questions(options.data, format, options.limit, options.seed)
    own = {"system_prompt": format.system, "engine_args": settings.engine_args | PREFIX_CACHING}
    settings = settings.model_copy(update=own)
    budgets = [make_budget(arm.budget).tokens for arm in options.arms if arm.budget is not None]
    if budgets:  # an engine that is started to evict
        settings = settings.model_copy(update={"kv_budget": max(budgets)})
    config = _config(settings, options, format)
    with SampleLog.open(options.rows, config) as log, blending_engine(settings, progress) as engine:
        for arm in options.arms:
            check_budget(arm.recipe(settings, "", ()).options, engine.facts.block_size)
        measuring = Measuring(engine, settings, options.max_tokens, progress)
        asked = [measuring.tokenize(question, format) for question in questions]
        fitting = [each for each in asked if measuring.fits(each)]
        if not fitting:
            raise PromptTooLongError(
                f"none of the prompts fits the model's window of {engine.max_model_len} tokens:"
                " use a model with a longer window"
            )
        measuring.run(fitting, options.arms, log)
        machine = engine.facts.machine(settings.model)
    order = {arm.name: number for number, arm in enumerate(options.arms)}
    samples = sorted((each for each in log.samples if each.arm in order), key=lambda each: order[each.arm])
    arms = summarise(samples, [each.question for each in fitting])
    decoding = summarise_decoding(samples, options.arms, {each.id: len(each.token_ids) for each in fitting})
    config |= {
        "rows": len(fitting),
        "too_long": [each.id for each in asked if each not in fitting],
        "tolerance": options.tolerance,
        "prompt_tokens": [len(each.token_ids) for each in fitting],
    }
    whole = {arm.name: arms[arm.name] for arm in options.arms if arm.budget is None and arm.name in arms}
    recommended = recommend(whole, options.tolerance)
    return Evaluation(arms, recommended, machine, config, decoding)


def _config(settings: Settings, options: EvalOptions, format: Format) -> dict[str, Any]:
    """Return what a sample depends on, but for its question and arm: a run goes on only with the same."""
    names = (
        "model", "lora", "dtype", "shared_prefix", "context_tokens", "separator",
        "chunk_tokens", "blend_share", "engine_args",
    )  # fmt: skip
    return {
        "data": options.data.name,
        "data_digest": xxhash.xxh3_64_hexdigest(options.data.read_bytes()),
        "format": format.name,
        "seed": options.seed,
        "max_tokens": options.max_tokens,
        "system_prompt": format.system,
        "cut": format.cut,
        "codec": settings.new_codec,
        "blendrag": blendrag.__version__,
        "commit": commit(),
        "vllm": installed_vllm(),
        "cpu": cpu(),
        "cores": cores(),
        "evicts": settings.kv_budget is not None,
        "omp_threads": os.environ.get("OMP_NUM_THREADS"),  # what torch makes of it, the engine knows
        **settings.model_dump(mode="json", include=set(names)),
    }
