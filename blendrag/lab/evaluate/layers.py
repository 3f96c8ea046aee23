"""``bench layers``: where in the model reuse does its damage, and how much of it recomputing which tokens
undoes (CacheBlend sections 4.2 and 4.3, figures 6 to 8), over real prompts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blendrag.engine.client.engine import Engine
from blendrag.errors import ConfigError
from blendrag.lab.bench.ingest import TemporaryStore, ingest_all, temporary_store
from blendrag.lab.evaluate.chunks import Documents, cut
from blendrag.lab.evaluate.formats import find_format
from blendrag.lab.evaluate.layer_statistics import summarise_probes
from blendrag.lab.evaluate.rows import read_rows
from blendrag.lab.progress import BenchProgress
from blendrag.lab.prompts import QUESTIONS, Prompt, PromptMaker, check_prompts
from blendrag.lab.running import blending_engine
from blendrag.lab.texts import text_pieces
from blendrag.machine import describe_machine
from blendrag.settings import Settings

RATIOS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0)
_POOL = 4  # chunks to choose from, per chunk of a prompt, of the built-in text


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """What is probed. data, format: rows of a file, as ``blendrag eval`` reads them, instead of ``chunks`` of
    ``chunk_tokens`` tokens of the built-in text. queries: last tokens whose attention is compared."""

    prompts: int = 8
    chunks: int = 6
    chunk_tokens: int = 256
    queries: int = 16
    data: Path | None = None
    format: str = "jsonl"
    seed: int = 0
    ratios: tuple[float, ...] = RATIOS

    def __post_init__(self) -> None:
        if self.prompts < 1 or self.queries < 1:
            raise ConfigError("--prompts and --queries must be at least 1")


@dataclass(frozen=True, slots=True)
class _Asked:
    """A prompt before its chunks are stored."""

    documents: Documents
    question: str


def run_layers(settings: Settings, options: LayerOptions, progress: BenchProgress) -> dict[str, Any]:
    """Probe; the results, JSON-able: what ``summarise_probes`` says, machine, config.

    Raises ConfigError, SourceError, ModelError, PromptTooLongError, EngineError.
    """
    system, asked = _reader(settings, options)
    with blending_engine(settings, progress) as engine:
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(str(engine.model_path))
        progress.note("cutting text into chunks")
        wanted = list(asked(tokenizer))
        maker = PromptMaker(tokenizer, system_prompt=system, separator=settings.separator)
        pieces = tuple(dict.fromkeys(piece for one in wanted for each in one.documents for piece in each))
        with temporary_store(engine, settings, pieces) as store:
            at = {chunk.token_ids: chunk for chunk in store.chunks}
            prompts = [
                maker.make_of([[at[piece] for piece in each] for each in one.documents], one.question)
                for one in wanted
            ]
            check_prompts(prompts, engine.max_model_len)
            progress.total(1 + len(prompts))
            progress.note("ingest")
            ingest_all(store.store, store.chunks, settings.ingest_batch_tokens)
            progress.step()
            probes = _probe(engine, store, prompts, options, progress)
    return summarise_probes(probes, options.ratios) | {
        "machine": describe_machine(settings.model, engine.facts),
        "config": asdict(options)
        | {
            "data": str(options.data) if options.data else None,
            "prompt_tokens": [len(prompt.token_ids) for prompt in prompts],
            "codec": settings.codec,
            "shared_prefix": settings.shared_prefix,
        },
    }


def _reader(settings: Settings, options: LayerOptions) -> tuple[str, Callable[[Any], Iterator[_Asked]]]:
    """The system prompt, and what makes the prompts once there is a tokenizer. The file is read here: what is
    wrong with it is told before the long start."""
    if options.data is None:
        return settings.system_prompt, lambda tokenizer: _built_in(tokenizer, options)
    format = find_format(options.format)
    rows = read_rows(options.data, format, options.prompts, options.seed)

    def from_rows(tokenizer: Any) -> Iterator[_Asked]:
        for row in rows:
            yield _Asked(cut(tokenizer, row, format, settings.chunk_tokens), row.question)

    return format.system, from_rows


def _built_in(tokenizer: Any, options: LayerOptions) -> Iterator[_Asked]:
    pool = text_pieces(tokenizer, _POOL * options.chunks, options.chunk_tokens)
    rng = random.Random(options.seed)
    for number in range(options.prompts):
        documents = tuple((piece,) for piece in rng.sample(pool, options.chunks))
        yield _Asked(documents, QUESTIONS[number % len(QUESTIONS)])


def _probe(
    engine: Engine,
    store: TemporaryStore,
    prompts: Sequence[Prompt],
    options: LayerOptions,
    progress: BenchProgress,
) -> list[dict[str, Any]]:
    probes = []
    for number, prompt in enumerate(prompts, start=1):
        progress.note(f"prompt {number} of {len(prompts)}")
        _, start, length = prompt.spans[-1]
        asking = min(options.queries, len(prompt.token_ids) - start - length)
        arguments = (store.id, list(prompt.token_ids), list(prompt.spans), list(options.ratios), asking)
        probes.append(engine.call("probe_layers", *arguments))
        progress.step()
    return probes
