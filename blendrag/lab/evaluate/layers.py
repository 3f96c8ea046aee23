"""``bench layers``: where in the model reuse does its damage, and how much of it recomputing which tokens
undoes (CacheBlend sections 4.2 and 4.3, figures 6 to 8), over real prompts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from blendrag.errors import ConfigError
from blendrag.lab.evaluate.chunks import Documents, cut, stored
from blendrag.lab.evaluate.formats import find_format
from blendrag.lab.evaluate.questions import read_questions
from blendrag.lab.prompts import QUESTIONS, PromptMaker, check_prompts
from blendrag.lab.report import table_with
from blendrag.lab.running import blending_engine
from blendrag.lab.scratch import scratch_store
from blendrag.lab.statistics import Spread, spread
from blendrag.lab.texts import text_pieces
from blendrag.machine import describe_machine
from blendrag.progress import Progress
from blendrag.settings import Settings

RATIOS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0)
TOP = 0.15  # of the tokens: the paper's default ratio
_POOL = 4  # chunks to choose from, per chunk of a prompt, of the built-in text
_SHOWN = 8  # layers in the table, of as many as the model has

Floats = Sequence[float] | np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """What is probed. data, format: questions of a file, as ``blendrag eval`` reads them, instead of
    ``chunks`` of ``chunk_tokens`` tokens of the built-in text. queries: last tokens whose attention is
    compared."""

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
class LayerDeviation:
    """How far stored K or V is from full prefill's: squared L2 per token by the layer's mean squared norm.

    mean, p50, p95: over the tokens. top_share: what share of all deviation the ``TOP`` tokens hold.
    next_layer: Spearman's rank correlation of the tokens' deviations with those of the layer above.
    """

    layer: int
    mean: Spread
    p50: Spread
    p95: Spread
    top_share: Spread
    next_layer: Spread | None


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """Over prompts: median and 10th to 90th percentile.

    layer0: largest deviation of layer 0, whose K and V depend on the token alone: 0 but for rounding.
    deviation (Figures 7 and 8): by ``v`` and ``k``, of the layers from 1.
    attention (Figure 6): per curve and ratio, the mean over layers from 1 of the forward attention deviation,
        relative to the norm of full prefill's attention matrix.
    """

    layer0: float
    deviation: dict[str, list[LayerDeviation]]
    attention: dict[str, dict[str, Spread]]
    machine: dict[str, Any]
    config: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_layers(settings: Settings, options: LayerOptions, progress: Progress) -> LayerProfile:
    """Probe. Raises ConfigError, SourceError, ModelError, PromptTooLongError, EngineError."""
    format = find_format(options.format)
    questions = options.data and read_questions(options.data, format, options.prompts, options.seed)
    with blending_engine(settings, progress) as engine:
        maker = PromptMaker.of(engine, settings, format.system if questions else None)
        tokenizer = maker.tokenizer
        if questions:
            asked = [(cut(tokenizer, one, format, settings.chunk_tokens), one.text) for one in questions]
        else:
            asked = list(_built_in(tokenizer, options))
        everything = tuple(document for documents, _ in asked for document in documents)
        with scratch_store(engine, settings, chain(*everything), filled=False) as store:
            prompts = [maker.make_of(stored(store, documents), question) for documents, question in asked]
            check_prompts(prompts, engine.max_model_len)
            progress.total(1 + len(prompts))
            progress.note("ingest")
            store.fill(store.chunks)
            progress.advance()
            probes = []
            for number, prompt in enumerate(prompts, start=1):
                progress.note(f"prompt {number} of {len(prompts)}")
                _, start, length = prompt.spans[-1]
                last = min(options.queries, len(prompt.token_ids) - start - length)
                arguments = (list(prompt.token_ids), list(prompt.spans), list(options.ratios), last)
                probes.append(engine.call("probe_layers", store.id, *arguments))
                progress.advance()
    config = asdict(options) | {
        "data": str(options.data) if options.data else None,
        "prompt_tokens": [len(prompt.token_ids) for prompt in prompts],
        "codec": settings.codec,
        "shared_prefix": settings.shared_prefix,
    }
    return profile(probes, options.ratios, describe_machine(settings.model, engine.facts), config)


def _built_in(tokenizer: Any, options: LayerOptions) -> Iterator[tuple[Documents, str]]:
    pool = text_pieces(tokenizer, _POOL * options.chunks, options.chunk_tokens)
    rng = random.Random(options.seed)
    for number in range(options.prompts):
        documents = tuple((piece,) for piece in rng.sample(pool, options.chunks))
        yield documents, QUESTIONS[number % len(QUESTIONS)]


def profile(
    probes: Sequence[Mapping[str, Any]],
    ratios: Sequence[float],
    machine: dict[str, Any],
    config: dict[str, Any],
) -> LayerProfile:
    """probes: a prompt each, as ``lab.worker.layer_probe`` gives them; layers from 0."""
    by_metric = {metric: [probe["deviation"][metric] for probe in probes] for metric in ("v", "k")}
    return LayerProfile(
        layer0=max(max(prompt[0]) for prompts in by_metric.values() for prompt in prompts),
        deviation={
            metric: [_deviation(layer, prompts) for layer in range(1, len(prompts[0]))]
            for metric, prompts in by_metric.items()
        },
        attention={
            curve: {
                f"{ratio:g}": spread([float(np.mean(probe["attention"][curve][at])) for probe in probes])
                for at, ratio in enumerate(ratios)
            }
            for curve in probes[0]["attention"]
        },
        machine=machine,
        config=config,
    )


def _deviation(layer: int, prompts: Sequence[Sequence[Floats]]) -> LayerDeviation:
    own = [np.asarray(prompt[layer]) for prompt in prompts]
    above = layer + 1 < len(prompts[0])
    return LayerDeviation(
        layer=layer,
        mean=spread([float(one.mean()) for one in own]),
        p50=spread([float(np.quantile(one, 0.5)) for one in own]),
        p95=spread([float(np.quantile(one, 0.95)) for one in own]),
        top_share=spread([top_share(one) for one in own]),
        next_layer=spread([spearman(each[layer], each[layer + 1]) for each in prompts]) if above else None,
    )


def spearman(one: Floats, other: Floats) -> float:
    """Rank correlation of two lists of equal length; ties have their mean rank. 0 where one is constant."""
    a, b = (_ranks(values) - (len(values) + 1) / 2 for values in (one, other))
    norm = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / norm if norm else 0.0


def _ranks(values: Floats) -> np.ndarray[Any, np.dtype[np.float64]]:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    ranks: np.ndarray[Any, np.dtype[np.float64]] = (np.cumsum(count) - (count - 1) / 2)[place]
    return ranks


def top_share(values: Floats, top: float = TOP) -> float:
    """Share of the sum that the largest ``top`` of the values hold; ``top`` of it if all are 0."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))[::-1]
    total = float(ordered.sum())
    return float(ordered[: max(1, round(top * ordered.size))].sum()) / total if total else top


def print_layers(results: LayerProfile, console: Console) -> None:
    """By layer, then by recompute ratio."""
    by_layer = table_with("layer", "V deviation", "p50", "p95", "top 15 %", "next layer", "K: top", "K: next")
    rows = list(zip(results.deviation["v"], results.deviation["k"], strict=True))
    for v, k in rows[:: max(1, len(rows) // _SHOWN)]:
        deviations = (f"{each.median:.3f}" for each in (v.mean, v.p50, v.p95))
        ranks = [f"{one.next_layer.median:.2f}" if one.next_layer else "" for one in (v, k)]
        tops = [f"{one.top_share.median:.0%}" for one in (v, k)]
        by_layer.add_row(str(v.layer), *deviations, tops[0], ranks[0], tops[1], ranks[1])
    by_ratio = table_with("recomputed", *results.attention)
    for ratio in results.config["ratios"]:
        of_ratio = (curve[f"{ratio:g}"] for curve in results.attention.values())
        by_ratio.add_row(f"{ratio:.0%}", *(f"{c.median:.3f} ({c.p10:.3f}-{c.p90:.3f})" for c in of_ratio))
    for part in (by_layer, _BY_LAYER, by_ratio, _BY_RATIO, _facts(results)):
        console.print(part, markup=False)


_BY_LAYER = (
    "Deviation of stored from full prefill's V: squared L2 per token by the layer's mean squared norm. top"
    " 15 %: what share of all deviation these tokens hold. next layer: Spearman's rank correlation of the"
    " tokens' deviations with those of the layer above. Medians of the prompts.\n"
)
_BY_RATIO = (
    "Attention of the last tokens: L2 distance from full prefill's attention matrix by its norm, mean over"
    " heads and layers (p10 to p90 of the prompts), with full prefill's queries. hkvd chooses at layer 1,"
    " hkvd_each at every layer by that layer's own deviation.\n"
)


def _facts(results: LayerProfile) -> str:
    config, machine = results.config, results.machine
    lengths = config["prompt_tokens"]
    source = f"{config['data']} ({config['format']})" if config["data"] else "built-in text"
    return (
        f"{len(lengths)} prompts of {min(lengths):,} to {max(lengths):,} tokens, {source}; codec"
        f" {config['codec']}, shared prefix {config['shared_prefix']}; {machine['model']}"
        f" ({machine['dtype']}). Layer 0 deviates by at most {results.layer0:.1g}."
    )
