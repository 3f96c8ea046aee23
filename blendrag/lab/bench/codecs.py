"""Codecs side by side: how small, how fast, and how far the answers drift from those of raw KV."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blendrag.engine.client.engine import Engine
from blendrag.lab.arms import Arm, Blending, FullPrefill, Sample, recipe_of
from blendrag.lab.bench.ingest import TemporaryStore, ingest_all, temporary_store
from blendrag.lab.bench.ttft import POOL, BenchOptions, check_length
from blendrag.lab.progress import BenchProgress
from blendrag.lab.prompts import PromptMaker, Trial
from blendrag.lab.running import blending_engine
from blendrag.lab.statistics import first_token_kl, spread
from blendrag.lab.texts import cut_chunks, file_texts, installed_texts
from blendrag.machine import describe_machine
from blendrag.prompt import encode_document
from blendrag.serving.identity import kv_identity, prefix_ids
from blendrag.settings import Settings
from blendrag.store.codec import Codec, codec_names
from blendrag.store.record import Layout, Record
from blendrag.store.stack import TierSpec
from blendrag.store.tiers.disk import DiskTier
from blendrag.store.tiers.interface import Opened, Read

REFERENCE = "raw"
_READ_BACK = 6  # chunks whose KV every codec is measured on
_BEST_OF = 5

Samples = Mapping[tuple[str, float], Sequence[Sample]]


def run_codecs(settings: Settings, options: BenchOptions, progress: BenchProgress) -> dict[str, Any]:
    """Measure every codec at ``options.ratios``; the results, JSON-able:

    codecs: per codec ``bytes_per_token``; ``k_error`` and ``v_error`` (norm of the difference by norm, mean
        over chunks and layers); ``encode_gb_s`` and ``decode_gb_s`` (10^9 bytes of KV as the model has it, by
        one thread); ``ratios``: per ratio what ``compare`` says.
    machine, config: as ``run_ttft``.

    Raises what ``run_ttft`` does.
    """
    texts = file_texts(options.data) if options.data else None
    with blending_engine(settings, progress) as engine:
        return _measure(engine, settings, options, installed_texts() if texts is None else texts, progress)


def _measure(
    engine: Engine,
    settings: Settings,
    options: BenchOptions,
    texts: Iterator[str] | Sequence[str],
    progress: BenchProgress,
) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(engine.model_path))
    progress.note("cutting text into chunks")
    pieces = cut_chunks(
        texts,
        lambda text: encode_document(tokenizer, text),
        options.chunk_tokens,
        least=options.chunks,
        most=POOL * options.chunks,
    )
    maker = PromptMaker(tokenizer, system_prompt=settings.system_prompt, separator=settings.separator)
    names = [REFERENCE, *(name for name in codec_names() if name != REFERENCE)]
    with contextlib.ExitStack() as stack:
        own = {name: settings.model_copy(update={"codec": name}) for name in names}
        stores = {name: stack.enter_context(temporary_store(engine, own[name], pieces)) for name in names}
        trials = {name: _trials(maker, store, options) for name, store in stores.items()}
        check_length(trials[REFERENCE], engine.max_model_len)
        progress.total(len(names) + (1 + len(names) * len(options.ratios)) * (options.repeats + 1))
        for name, store in stores.items():
            progress.note(f"ingest: {name}")
            ingest_all(store.store, store.chunks, settings.ingest_batch_tokens)
            progress.step()
        records = _read_back(stores[REFERENCE], _layout(engine, own[REFERENCE]))
        costs = {name: measure_codec(_layout(engine, own[name]).codec, records) for name in names}
        arms: dict[tuple[str, float], Arm] = {
            (name, ratio): Blending(recipe_of(settings, store.id, ratio))
            for name, store in stores.items()
            for ratio in options.ratios
        }
        arms["full", 1.0] = FullPrefill()
        trials["full"] = trials[REFERENCE]
        samples = _interleaved(engine, arms, trials, progress)
    return {
        "codecs": {
            name: costs[name] | {"ratios": {f"{r:g}": compare(samples, name, r) for r in options.ratios}}
            for name in names
        },
        "machine": describe_machine(settings.model, engine.facts),
        "config": asdict(options)
        | {
            "data": str(options.data) if options.data else None,
            "prompt_tokens": [len(trial.prompt.token_ids) for trial in trials[REFERENCE][1:]],
            "pool_chunks": len(pieces),
            "selector": settings.selector,
            "metric": settings.metric,
            "check_layers": list(settings.check_layers),
        },
    }


def compare(samples: Samples, name: str, ratio: float) -> dict[str, float]:
    """One codec at one ratio against raw at the same one, prompt by prompt.

    kl_from_raw (nats; mean), kl_from_raw_p90, top1_agreement: of the first token. kl_from_full: raw has one
    too, which is what blending itself costs. ttft_ms: median.
    """
    own, raw, full = samples[name, ratio], samples[REFERENCE, ratio], samples["full", 1.0]
    pairs = list(zip(own, raw, strict=True))
    kl = [first_token_kl(reference.logprobs, sample.logprobs) for sample, reference in pairs]
    to_full = [first_token_kl(a.logprobs, b.logprobs) for a, b in zip(full, own, strict=True)]
    return {
        "kl_from_raw": float(np.mean(kl)),
        "kl_from_raw_p90": spread(kl)["p90"],
        "top1_agreement": float(np.mean([sample.token == reference.token for sample, reference in pairs])),
        "kl_from_full": float(np.mean(to_full)),
        "ttft_ms": spread([sample.ttft_ms for sample in own])["median"],
    }


def measure_codec(codec: Codec, records: Sequence[torch.Tensor]) -> dict[str, float]:
    """Size, error and speed of a codec on KV as the model made it, each [layers, 2, tokens, heads, size]."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the thread that loads
    try:
        kv = records[0]
        layers, _, tokens = kv.shape[:3]
        encode_s, rows = _best(lambda: codec.encode(kv))
        into = torch.empty_like(kv)
        decode_s, _ = _best(lambda: _decode(codec, rows, into))
        errors = [_errors(codec, each) for each in records]
    finally:
        torch.set_num_threads(threads)
    key, value = np.mean(errors, axis=0)
    return {
        "bytes_per_token": layers * codec.row_bytes(tokens) / tokens,
        "k_error": float(key),
        "v_error": float(value),
        "encode_gb_s": kv.nbytes / encode_s / 1e9,
        "decode_gb_s": kv.nbytes / decode_s / 1e9,
    }


def _decode(codec: Codec, rows: torch.Tensor, into: torch.Tensor) -> None:
    for row, (key, value) in zip(rows, into, strict=True):
        codec.decode(row, into.shape[2], key, value)


def _errors(codec: Codec, kv: torch.Tensor) -> list[float]:
    """Relative error of K and of V, mean over layers."""
    found = torch.empty_like(kv)
    _decode(codec, codec.encode(kv), found)
    exact = kv.float().flatten(2)
    ratio: list[float] = ((found.float().flatten(2) - exact).norm(dim=2) / exact.norm(dim=2)).mean(0).tolist()
    return ratio


def _best(work: Callable[[], Any]) -> tuple[float, Any]:
    """Least seconds of this thread, and the result. The first run is a warm-up."""
    result, times = work(), []
    for _ in range(_BEST_OF):
        begin = time.thread_time()
        result = work()
        times.append(time.thread_time() - begin)
    return min(times), result


# -- stores and prompts -----------------------------------------------------------------------------------


def _trials(maker: PromptMaker, store: TemporaryStore, options: BenchOptions) -> list[Trial]:
    """The same prompts for every store: chunks' keys differ, their order does not."""
    rng = random.Random(options.seed)
    return [maker.trial(store.chunks, options.chunks, rng, n) for n in range(options.repeats + 1)]


def _layout(engine: Engine, settings: Settings) -> Layout:
    identity = kv_identity(settings, engine.model_path, prefix_ids(settings, engine.model_path))
    return Layout(identity, str(engine.facts["dtype"]))


def _read_back(store: TemporaryStore, layout: Layout) -> list[torch.Tensor]:
    """KV of some chunks, from the files that the engine wrote."""
    # A store's id is its folder.
    disk = DiskTier(TierSpec(kind="disk", write="never"), layout, Path(store.id) / "kv")
    found = []
    for opened in disk.open([chunk.key for chunk in store.chunks[:_READ_BACK]]).values():
        if not isinstance(opened, Opened):
            raise opened
        rows = torch.empty(layout.num_layers, opened.head.row_bytes, dtype=torch.uint8)
        disk.read([Read(opened, 0, layout.num_layers, rows)])
        disk.close_record(opened)
        found.append(Record(opened.head, rows).decode())
    return found


def _interleaved(
    engine: Engine,
    arms: Mapping[tuple[str, float], Arm],
    trials: Mapping[str, Sequence[Trial]],
    progress: BenchProgress,
) -> dict[tuple[str, float], list[Sample]]:
    """As in ``ttft``: the first prompt is the warm-up; each later one begins with another arm."""
    samples: dict[tuple[str, float], list[Sample]] = {at: [] for at in arms}
    order = list(arms.items())
    repeats = len(trials[REFERENCE]) - 1
    for number in range(repeats + 1):
        shift = number % len(order)
        for (name, ratio), arm in (*order[shift:], *order[:shift]):
            what = f"prompt {number} of {repeats}" if number else "warm-up"
            progress.note(f"{what}: {name} at {ratio:g}")
            sample = arm.run(engine, trials[name][number])
            if number:
                samples[name, ratio].append(sample)
            progress.step()
    return samples
