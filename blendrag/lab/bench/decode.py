"""Measure what decoding from a part of a prompt's KV saves (Ada-KV; ``bench load --kv-budget``)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from rich.table import Table

from blendrag.engine.client.engine import Engine
from blendrag.engine.wire.recipe import Recipe
from blendrag.errors import EngineError
from blendrag.lab.arms import check_blended, recipe_of, reset
from blendrag.lab.bench.timed import Timed, ask_timed, exactly
from blendrag.lab.experiment import in_turn
from blendrag.lab.options import DecodeOptions
from blendrag.lab.prompts import QUESTIONS, Prompt, PromptMaker, check_prompts
from blendrag.lab.results import Results, Setup, where
from blendrag.lab.running import blending_engine
from blendrag.lab.scratch import scratch_store
from blendrag.lab.statistics import Spread, spread
from blendrag.lab.texts import text_pieces
from blendrag.progress import Progress
from blendrag.settings import Settings
from blendrag.store.stack import TierSpec
from blendrag.tables import table_with

ARMS = ("whole", "evicted", "floor")
_GAUGE = "vllm:kv_cache_usage_perc"
_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class Round:
    """A round of answers at once. ttft_s: of the first of them. second_s: from an answer's first token to its
    second, mean: what is kept is chosen meanwhile. itl_s: between two tokens of an answer, mean while all of
    them decode; held: share of the engine's KV blocks that they have meanwhile."""

    ttft_s: float
    second_s: float
    itl_s: float
    held: float


MEASURES = tuple(field.name for field in fields(Round))


@dataclass(frozen=True, slots=True)
class DecodeResults(Results):
    """Results of decoding. rows: by arm and number of answers, the spread of each of :data:`MEASURES`, and of
    its ``ratio_`` to ``whole``, round by round. whole: decoded from all KV; evicted: from the budget; floor:
    from all KV of prompts about as short as the budget. kept, freed: tokens and blocks of an evicted prompt.
    """

    rows: dict[tuple[str, int], dict[str, Spread]]
    kept: int
    freed: int
    setup: Setup[DecodeOptions]

    def to_dict(self) -> dict[str, Any]:
        rows = [
            {"arm": arm, "answers": count} | {name: asdict(each) for name, each in own.items()}
            for (arm, count), own in self.rows.items()
        ]
        return {"rows": rows, "kept": self.kept, "freed": self.freed} | self.setup.to_dict()

    def parts(self) -> Iterator[Table | str]:
        """Yield a row per arm and number of answers."""
        table = table_with("arm", "at once", "TTFT ms", "x", "2nd ms", "ms", "x", "held", "x")
        for (arm, count), found in self.rows.items():
            own = {name: each.median for name, each in found.items()}
            table.add_row(
                arm,
                str(count),
                f"{1e3 * own['ttft_s']:,.0f}",
                f"{own['ratio_ttft_s']:.2f}x",
                f"{1e3 * own['second_s']:,.0f}",
                f"{1e3 * own['itl_s']:,.1f}",
                f"{own['ratio_itl_s']:.2f}x",
                f"{own['held']:.1%}",
                f"{own['ratio_held']:.2f}x",
            )
        setup, options = self.setup, self.setup.options
        yield table
        yield (
            f"whole: decoded from all KV; evicted: from {self.kept} tokens a head, {self.freed} blocks of a"
            " prompt given back; floor: from all KV of prompts about as short. TTFT: of the first of them;"
            " 2nd: from the first token to the second, between which what is kept is chosen; ms: a token"
            f" after that; held: of the engine's KV blocks; x: to whole."
            f" {options.repeats} repeats, {options.max_tokens} tokens an answer,"
            f" {max(setup.prompt_tokens):,} a prompt. {where(setup.machine)}."
        )


def run_decode(settings: Settings, options: DecodeOptions, progress: Progress) -> DecodeResults:
    """Measure decoding. settings: with the budget, for which the engine is started. Raises ConfigError,
    ModelError, PromptTooLongError, StoreError, EngineError."""
    with blending_engine(settings, progress) as engine:
        maker = PromptMaker.of(engine, settings)
        pieces = text_pieces(maker.tokenizer, options.chunks + options.answers, options.chunk_tokens)
        progress.note("ingest")
        with scratch_store(engine, settings, pieces, TierSpec(kind="ram")) as store:
            count = (1 + options.repeats) * options.answers
            few = max(1, options.kv_budget // options.chunk_tokens)
            pool, rng = store.chunks, random.Random(options.seed)
            long = [maker.make(rng.sample(pool, options.chunks), QUESTIONS[0]) for _ in range(count)]
            chosen = [[pool[(n + at) % len(pool)] for at in range(few)] for n in range(count)]
            short = [maker.make(chunks, QUESTIONS[0]) for chunks in chosen]  # those at once are others
            check_prompts(long, engine.max_model_len, options.max_tokens)
            recipe = recipe_of(settings, store.id)
            whole = replace(recipe, options=replace(recipe.options, kv_budget=None))
            arms = {"whole": (long, whole), "evicted": (long, recipe), "floor": (short, whole)}
            keys = {(name, at_once): arms[name] for at_once in (1, options.answers) for name in ARMS}
            rounds: dict[tuple[str, int], list[Round]] = {key: [] for key in keys}
            kept = freed = 0
            for turn in in_turn(keys, range(1 + options.repeats), progress):
                name, at_once = turn.key
                prompts, recipe_of_arm = turn.arm
                own = prompts[turn.trial * options.answers :][:at_once]
                found, timed = asyncio.run(_round(engine, own, recipe_of_arm, options.max_tokens))
                if not turn.warms_up:
                    rounds[turn.key].append(found)
                report = check_blended(name, timed[0].report)
                if name == "evicted":
                    if report.kv_whole:
                        raise EngineError(f"nothing was evicted: {report.kv_whole}")
                    kept, freed = report.kv_kept, report.kv_freed
        rows = {key: _summary(found, rounds["whole", key[1]]) for key, found in rounds.items()}
        return DecodeResults(rows, kept, freed, Setup.of(engine, settings, options, long))


async def _round(
    engine: Engine, prompts: Sequence[Prompt], recipe: Recipe, tokens: int
) -> tuple[Round, list[Timed]]:
    """Ask all prompts at once, each blended."""
    reset(engine)
    now = time.perf_counter()
    timed = [Timed(now) for _ in prompts]
    looks: list[tuple[float, float]] = []

    async def look() -> None:
        while True:
            looks.append((time.perf_counter(), _held()))
            await asyncio.sleep(_LOOK_S)

    looking = asyncio.create_task(look())
    try:
        await asyncio.gather(
            *(
                ask_timed(engine, prompt.token_ids, exactly(tokens), own, replace(recipe, spans=prompt.spans))
                for prompt, own in zip(prompts, timed, strict=True)
            )
        )
    finally:
        looking.cancel()
    # From the last one's second token, behind which its KV is evicted, to the first one's last.
    begin, end = max(own.tokens[1] for own in timed), min(own.tokens[-1] for own in timed)
    gaps = [b - a for own in timed for a, b in own.gaps if a >= begin and b <= end]
    if not gaps:
        raise EngineError("no time in which all answers were decoded: ask for more --max-tokens")
    held = [share for at, share in looks if begin <= at <= end] or [looks[-1][1]]
    first = min(own.tokens[0] for own in timed) - now
    second = sum(own.tokens[1] - own.tokens[0] for own in timed) / len(timed)
    return Round(first, second, sum(gaps) / len(gaps), max(held)), timed


def _held() -> float:
    """Return the share of KV blocks that are held, by the latest engine's gauge."""
    from prometheus_client import REGISTRY

    shares = [
        sample.value for metric in REGISTRY.collect() for sample in metric.samples if sample.name == _GAUGE
    ]
    return shares[-1] if shares else 0.0


def _summary(own: Sequence[Round], whole: Sequence[Round]) -> dict[str, Spread]:
    found = {}
    for name in MEASURES:
        mine, base = ([getattr(each, name) for each in rounds] for rounds in (own, whole))
        found[name] = spread(mine)
        pairs = zip(mine, base, strict=True)
        found[f"ratio_{name}"] = spread([one / other if other else 0.0 for one, other in pairs])
    return found
