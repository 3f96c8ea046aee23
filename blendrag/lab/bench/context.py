"""How far a chunk's stored KV is from what it is behind other documents, by what it was prefilled behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from blendrag.engine.client.engine import Engine
from blendrag.errors import ConfigError
from blendrag.lab import canvas
from blendrag.lab.prompts import PromptMaker
from blendrag.lab.report import where
from blendrag.lab.running import blending_engine
from blendrag.lab.scratch import scratch_store
from blendrag.lab.setup import Setup
from blendrag.lab.texts import file_texts, installed_texts
from blendrag.progress import Progress
from blendrag.prompt import encode_document
from blendrag.settings import Settings, SharedPrefix
from blendrag.store.contexts import Ids
from blendrag.tables import table_with

# By name: the prefix, and whose text stands between it and the chunk: that of the text this many further.
WAYS: dict[str, tuple[SharedPrefix, int | None]] = {
    "alone": ("none", None),
    "start": ("start", None),
    "own text": ("start", 0),
    "other text": ("start", 2),
}
_REFERENCE = 1
_COLOURS = dict(zip(WAYS, ("#e9a23b", "#8e6cc0", "#2f81c7", "#6e7781"), strict=True))


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """texts: how many, each with a chunk of ``chunk_tokens``. before: tokens of other text that the chunk
    stands behind in a prompt. data: a text or JSONL file instead of the built-in text."""

    texts: int = 16
    chunk_tokens: int = 256
    before: int = 1024
    data: Path | None = None


@dataclass(frozen=True, slots=True)
class ContextResults:
    """deviation: per way, of K (before RoPE) and V, and per distance from the chunk's beginning (0, 1, 2-3,
    4-7, ...): squared distance to the KV behind other text, by that KV's mean squared norm; mean over layers
    (but layer 0, where there is none) and texts. context_tokens: of ``own text`` and ``other text``."""

    deviation: dict[str, dict[str, list[float]]]
    context_tokens: int
    setup: Setup[ContextOptions]

    def to_dict(self) -> dict[str, Any]:
        return {"deviation": self.deviation, "context_tokens": self.context_tokens} | self.setup.to_dict()


def run_context(settings: Settings, options: ContextOptions, progress: Progress) -> ContextResults:
    """Measure. Raises ConfigError, SourceError, ModelError, StoreError, EngineError."""
    given = file_texts(options.data) if options.data else None
    tokens = min(settings.context_tokens, options.before)
    with blending_engine(settings, progress) as engine:
        texts = _texts(PromptMaker.of(engine, settings).tokenizer, given, options)
        progress.total(1 + len(WAYS))

        def kv(name: str, prefix: SharedPrefix, further: int | None, tokens: int) -> torch.Tensor:
            progress.note(f"prefill: {name}")
            contexts = _before(texts, options.before, further, tokens)
            found = _prefilled(engine, settings, prefix, contexts, [each[options.before :] for each in texts])
            progress.advance()
            return found

        reference = kv("behind other text", "start", _REFERENCE, options.before)
        norm = reference.square().sum((-1, -2)).mean(-1, keepdim=True)
        deviation = {}
        for name, (prefix, further) in WAYS.items():
            apart = (kv(name, prefix, further, tokens) - reference).square().sum((-1, -2)) / norm
            by_place = apart[:, 1:].mean((0, 1))
            deviation[name] = {part: _by_distance(row) for part, row in zip("KV", by_place, strict=True)}
        setup = Setup.of(engine, settings.model_copy(update={"codec": "raw"}), options, ())
        return ContextResults(deviation, tokens, setup)


def _texts(tokenizer: Any, given: Sequence[str] | None, options: ContextOptions) -> list[Ids]:
    """Token ids of texts whose chunks differ: what stands before the chunk, and the chunk."""
    size = options.before + options.chunk_tokens
    found: dict[Ids, Ids] = {}
    for text in installed_texts() if given is None else given:
        ids = tuple(encode_document(tokenizer, text)[:size])
        if len(ids) == size:
            found[ids[options.before :]] = ids
        if len(found) == options.texts:
            return list(found.values())
    raise ConfigError(
        f"{options.texts} different texts of {size} tokens are needed, and there are {len(found)}:"
        " give more text (--data), or ask for fewer tokens"
    )


def _before(texts: Sequence[Ids], end: int, further: int | None, tokens: int) -> list[Ids]:
    """Per text, what stands before the chunk of the text so much further; None: nothing."""
    if further is None:
        return [()] * len(texts)
    return [texts[(at + further) % len(texts)][end - tokens : end] for at in range(len(texts))]


def _prefilled(
    engine: Engine, settings: Settings, prefix: SharedPrefix, contexts: Sequence[Ids], chunks: Sequence[Ids]
) -> torch.Tensor:
    """KV of each chunk behind its context, [chunks, layers, 2, tokens, heads, size] float32."""
    longest = max(map(len, contexts))
    own = settings.model_copy(
        update={"shared_prefix": prefix, "context_tokens": longest, "codec": "raw", "namespace": ""}
    )
    with scratch_store(engine, own, filled=False) as store:
        made = [store.document([ids], before)[0] for ids, before in zip(chunks, contexts, strict=True)]
        store.register("context", made)
        store.fill(made)
        return torch.stack(store.read_back(made, engine.facts.dtype)).float()


def _by_distance(row: torch.Tensor) -> list[float]:
    edges = [0, *(1 << power for power in range(len(row).bit_length())), len(row)]
    return [float(row[begin:end].mean()) for begin, end in pairwise(edges) if begin < end]


def print_context(results: ContextResults, console: Console) -> None:
    """A row per way and part, a column per distance."""
    count = len(results.deviation["alone"]["K"])
    names = ["0", "1", *(f"{1 << at}-{(2 << at) - 1}" for at in range(1, count))]
    table = table_with("behind", "of", *names[:count])
    for name, parts in results.deviation.items():
        for part, row in parts.items():
            table.add_row(name, part, *(f"{value:.2f}" for value in row))
    console.print(table)
    setup = results.setup
    console.print(
        "Squared deviation by squared norm, by distance from the chunk's beginning; own and other text:"
        f" {results.context_tokens} tokens; {setup.options.texts} texts. {where(setup.machine)}.",
        markup=False,
    )


def draw_context(results: ContextResults, path: Path) -> None:
    """Write the picture: deviation against the distance from the chunk's beginning, K and V."""
    figure = canvas.new_figure(10, 3.6)
    panels = figure.subplots(1, 2)
    for axes, part in zip(panels, "KV", strict=True):
        for name, parts in results.deviation.items():
            axes.plot(parts[part], marker="o", markersize=4, color=_COLOURS[name], label=name)
        axes.set_yscale("log")
        count = len(results.deviation["alone"][part])
        axes.set_xticks(range(count), ["0", *(str(1 << at) for at in range(count - 1))])
        canvas.finish_axes(axes, part, "token of the chunk", "squared deviation / squared norm")
    canvas.add_legend(figure, panels[0])
    canvas.save(figure, path, results.setup.machine)
