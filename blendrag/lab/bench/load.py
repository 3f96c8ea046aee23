"""Throughput under an open-loop load of questions with re-used chunks (CacheBlend figure 14)."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import asdict, replace
from typing import Any

from blendrag.embedder import Embedder
from blendrag.lab.arms import recipe_of
from blendrag.lab.bench.load_runs import LoadOptions, LoadRuns, Ways
from blendrag.lab.bench.paraphrases import PHRASINGS, extended_set
from blendrag.lab.progress import BenchProgress
from blendrag.lab.prompts import PromptMaker, check_prompts
from blendrag.lab.running import blending_engine
from blendrag.lab.texts import text_pieces
from blendrag.lab.trial_store import TrialStore, trial_store
from blendrag.machine import describe_machine
from blendrag.models import resolve_embedder
from blendrag.prompt.template import decode
from blendrag.settings import Settings
from blendrag.store.stack import TierSpec


def run_load(settings: Settings, options: LoadOptions, progress: BenchProgress) -> dict[str, Any]:
    """Measure; the results, JSON-able:

    arms: per arm (full, prefix, blended) ``alone``: medians of ``ttft_ms`` and ``total_ms`` of requests one
        after another; ``runs``: per rate what ``summarise_run`` says, ascending; and what ``sustained`` says.
    bound_ms: of p95 TTFT.
    machine, config: as ``run_ttft``.

    At one rate all arms are sent the same prompts at the same times, from an empty prefix cache. Raises
    ConfigError, ModelError, PromptTooLongError, StoreError, EngineError.
    """
    with blending_engine(settings, progress) as engine:
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(str(engine.model_path))
        progress.note("finding the chunks of every question")
        pieces = text_pieces(tokenizer, options.pool, options.chunk_tokens)
        queries = extended_set(
            [decode(tokenizer, piece) for piece in pieces],
            Embedder(resolve_embedder(settings.embedder)).embed,
            options.questions, options.chunks, options.seed, shuffled=options.order == "shuffled",
        )  # fmt: skip
        progress.note("ingest")
        with trial_store(engine, settings, TierSpec(kind="ram"), pieces) as store:
            maker = PromptMaker(tokenizer, system_prompt=settings.system_prompt, separator=settings.separator)
            prompts = [
                maker.make([store.chunks[at] for at in query.chunks], query.question) for query in queries
            ]
            check_prompts(prompts, engine.max_model_len, options.max_tokens)
            runs = LoadRuns(engine, prompts, _ways(settings, store), options, progress)
            found = asyncio.run(runs.measure())
    return found | {
        "machine": describe_machine(settings.model, engine.facts),
        "config": asdict(options) | {
            "phrasings": len(PHRASINGS), "ratio": settings.recompute_ratio, "selector": settings.selector,
            "codec": settings.codec, "blend_share": settings.blend_share,
            "prompt_tokens": [len(prompt.token_ids) for prompt in prompts],
        },
    }  # fmt: skip


def _ways(settings: Settings, store: TrialStore) -> Ways:
    """Full prefill is a namespace of its own per request: nobody's KV is found there. The engine's prefix
    caching is left as it is for the two others; it finds blended KV again, too."""
    alone, recipe = itertools.count(), recipe_of(settings, store.id)
    return {
        "full": lambda prompt: (None, f"alone-{next(alone)}"),
        "prefix": lambda prompt: (None, ""),
        "blended": lambda prompt: (replace(recipe, spans=prompt.spans), ""),
    }
