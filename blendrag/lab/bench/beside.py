"""Head-of-line blocking: what running answers lose when a long prompt arrives, or chunks are ingested, beside
them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from blendrag.engine.client.engine import Engine
from blendrag.engine.recipe import Recipe
from blendrag.errors import ConfigError
from blendrag.lab.arms import check_blended, recipe_of, reset
from blendrag.lab.bench.timed import Timed, ask_timed, exactly, stop
from blendrag.lab.experiment import in_turn
from blendrag.lab.prompts import Prompt, PromptMaker, check_prompts
from blendrag.lab.running import blending_engine
from blendrag.lab.scratch import ScratchStore, scratch_store
from blendrag.lab.setup import Setup
from blendrag.lab.statistics import Percentiles, Spread, percentiles, spread
from blendrag.lab.texts import text_pieces
from blendrag.progress import Progress
from blendrag.prompt import encode_document
from blendrag.settings import Settings
from blendrag.store.contexts import NewChunk
from blendrag.store.stack import TierSpec

CONDITIONS = ("alone", "full", "blended", "slow", "ingest")
DECODES = 2  # answers that run all the time, one begun when one ends
DECODE_TOKENS = 200
_SLOW = 20_000_000  # bytes a second
_POOL = 2  # chunks in the store, per chunk of a prompt
_ROOM = 1.3  # of a full prefill's time: from one arrival to the next, so that none waits for the last one
_LOOK_S = 0.02  # how often it is looked whether all decodes run
TokenGap = tuple[float, float]  # begin and end of the time between two tokens of an answer
_STORY = "Write a long story about a lighthouse keeper, a storm and the letter that came with it. Part {}."


@dataclass(frozen=True, slots=True)
class BesideOptions:
    """What is measured. arrivals: long prompts per window; repeats: windows of each condition."""

    chunks: int = 6
    chunk_tokens: int = 512
    arrivals: int = 3
    repeats: int = 2
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Beside:
    """One condition. itl_ms: between tokens, of all windows; during_ms: of those that an arrival fell into.
    arrival_ttft_ms: None where nothing arrived. tokens_per_s: of all decodes."""

    itl_ms: Percentiles[float]
    during_ms: Percentiles[float]
    arrival_ttft_ms: Spread | None
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class ToAlone:
    """One condition's latencies by those of ``alone``, repeat by repeat."""

    itl: Percentiles[Spread]
    during: Percentiles[Spread]


@dataclass(frozen=True, slots=True)
class BesideResults:
    """conditions: alone, full (full prefills arrive), blended (blends of the same prompts), slow (these from
    a disk of 20 MB/s), ingest (their chunks are prefilled and stored). ratios: of those with arrivals. gap:
    seconds between arrivals. trace: per condition (seconds, ms) of every token of the last window: since its
    beginning, and since the token before."""

    conditions: dict[str, Beside]
    ratios: dict[str, ToAlone]
    gap: float
    trace: dict[str, list[tuple[float, float]]]
    setup: Setup[BesideOptions]

    def to_dict(self) -> dict[str, Any]:
        return {
            "conditions": {name: asdict(own) for name, own in self.conditions.items()},
            "ratios": {name: asdict(own) for name, own in self.ratios.items()},
            "gap": self.gap,
            "trace": self.trace,
        } | self.setup.to_dict()


def run_beside(settings: Settings, options: BesideOptions, progress: Progress) -> BesideResults:
    """Raises ConfigError, ModelError, PromptTooLongError, StoreError, EngineError."""
    with blending_engine(settings, progress) as engine:
        maker = PromptMaker.of(engine, settings)
        pieces = text_pieces(maker.tokenizer, _POOL * options.chunks, options.chunk_tokens)
        progress.note("ingest")
        with (
            scratch_store(engine, settings, pieces, TierSpec(kind="ram")) as store,
            scratch_store(engine, settings, pieces, TierSpec(kind="disk", throttle=_SLOW)) as slow,
        ):
            count = 1 + options.arrivals * options.repeats
            trials = maker.trials(store.chunks, options.chunks, count, options.seed)
            prompts = [trial.prompt for trial in trials]
            stories = [encode_document(maker.tokenizer, _STORY.format(number)) for number in range(DECODES)]
            check_prompts(prompts, engine.max_model_len)
            short = [Prompt(story, ()) for story in stories]
            check_prompts(short, engine.max_model_len, DECODE_TOKENS)
            recipes = {"blended": recipe_of(settings, store.id), "slow": recipe_of(settings, slow.id)}
            twins = {one.key: other for one, other in zip(store.chunks, slow.chunks, strict=True)}
            beside = _Beside(engine, recipes, stories, options, progress, slow, twins)
            windows, gap = asyncio.run(beside.measure(prompts))
        return BesideResults(
            {name: summarise_windows(own) for name, own in windows.items()},
            ratios_to_alone(windows),
            gap,
            {name: own[-1].trace() for name, own in windows.items()},
            Setup.of(engine, settings, options, prompts),
        )


class _Beside:
    """The windows of one measurement."""

    def __init__(
        self,
        engine: Engine,
        recipes: Mapping[str, Recipe],
        stories: Sequence[Sequence[int]],
        options: BesideOptions,
        progress: Progress,
        slow: ScratchStore,
        twins: Mapping[str, NewChunk],
    ) -> None:
        """slow: a second store. twins: its chunks, by the keys that they have in prompts."""
        self._engine, self._recipes, self._stories = engine, recipes, stories
        self._slow, self._twins = slow, twins
        self._options, self._progress = options, progress
        self._names = itertools.count()

    async def measure(self, prompts: Sequence[Prompt]) -> tuple[dict[str, list[MeasuredWindow]], float]:
        """Per condition a window per repeat, and the gap. The first prompt warms up, and says how long a full
        prefill takes beside the decodes."""
        warm_up, *own = prompts
        gap = 0.0
        for turn in in_turn(dict.fromkeys(reversed(CONDITIONS)), [warm_up], self._progress):
            window = await self._window(turn.key, [turn.trial], gap)
            if turn.key == "full":
                gap = _ROOM * window.waits[0]
        count = self._options.arrivals
        rounds = [own[at : at + count] for at in range(0, len(own), count)]
        windows: dict[str, list[MeasuredWindow]] = {condition: [] for condition in CONDITIONS}
        for turns in in_turn(dict.fromkeys(CONDITIONS), rounds, self._progress, warm_up=0):
            windows[turns.key].append(await self._window(turns.key, turns.trial, gap))
        return windows, gap

    async def _window(self, condition: str, prompts: Sequence[Prompt], gap: float) -> MeasuredWindow:
        """Decodes all the time; a prompt every ``gap`` seconds. It ends a gap after the last one, and not
        before the last first token: what the decodes lost until then belongs to it."""
        reset(self._engine)
        decodes: list[Timed] = []
        arrivals: list[Timed] = []
        tasks = [asyncio.create_task(self._decode(story, decodes)) for story in self._stories]
        try:
            while sum(bool(decode.tokens) for decode in decodes) < len(tasks):
                failed, _ = await asyncio.wait(tasks, timeout=_LOOK_S, return_when=asyncio.FIRST_EXCEPTION)
                for task in failed:
                    task.result()  # raises
            begin = time.perf_counter()
            for number, prompt in enumerate(prompts):
                if condition != "alone":
                    arrivals.append(Timed(begin + number * gap))
                    tasks.append(asyncio.create_task(self._arrive(condition, prompt, arrivals[-1])))
                await asyncio.sleep(begin + (number + 1) * gap - time.perf_counter())
            await asyncio.gather(*tasks[len(self._stories) :])
            end = time.perf_counter()
        finally:
            await stop(self._engine, tasks)
        return MeasuredWindow(begin, end, decodes, arrivals)

    async def _decode(self, story: Sequence[int], decodes: list[Timed]) -> None:
        """One answer after the other."""
        while True:
            decodes.append(Timed(time.perf_counter()))
            await ask_timed(self._engine, story, exactly(DECODE_TOKENS), decodes[-1])

    async def _arrive(self, condition: str, prompt: Prompt, timed: Timed) -> None:
        """A first token. A namespace of its own: nothing of it is in the prefix cache."""
        spans = prompt.spans
        if condition == "ingest":
            await asyncio.to_thread(_ingest_again, self._slow, [self._twins[key] for key, *_ in spans])
            timed.tokens.append(time.perf_counter())
            return
        if condition == "slow":
            spans = tuple((self._twins[key].key, start, length) for key, start, length in spans)
            await asyncio.to_thread(self._slow.make_cold)
        recipe = self._recipes.get(condition)
        recipe = recipe and replace(recipe, spans=spans)
        name = f"beside-{next(self._names)}"
        await ask_timed(self._engine, prompt.token_ids, exactly(1), timed, recipe, name)
        if recipe is not None:
            check_blended("what arrived", timed.report)


def _ingest_again(store: ScratchStore, chunks: Sequence[NewChunk]) -> None:
    store.client.delete([chunk.key for chunk in chunks])
    for batch in store.batches(chunks):
        store.client.ingest(batch)
    store.client.flush()


# -- numbers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MeasuredWindow:
    """Seconds on one clock. decodes: answers that ran; arrivals: prompts that came beside them."""

    begin: float
    end: float
    decodes: Sequence[Timed]
    arrivals: Sequence[Timed]

    @property
    def gaps(self) -> list[TokenGap]:
        """Between tokens, as far as the second of them came in the window; by time."""
        gaps = [gap for decode in self.decodes for gap in decode.gaps if self.begin <= gap[1] < self.end]
        return sorted(gaps, key=lambda gap: gap[1])

    @property
    def waits(self) -> list[float]:
        """Of the arrivals, for their first token."""
        return [arrival.tokens[0] - arrival.due for arrival in self.arrivals if arrival.tokens]

    @property
    def during(self) -> list[TokenGap]:
        """Those gaps that an arrival fell into, between its being due and its first token. Unlike ``gaps``
        they do not depend on how far the arrivals are apart. All gaps, where nothing arrived."""
        spans = [(arrival.due, arrival.tokens[0]) for arrival in self.arrivals if arrival.tokens]
        met = [gap for gap in self.gaps if any(gap[0] < stop and gap[1] > start for start, stop in spans)]
        return met if self.arrivals else self.gaps

    def trace(self) -> list[tuple[float, float]]:
        """(seconds since the beginning, ms since the answer's last token) per token."""
        return [(after - self.begin, 1e3 * (after - before)) for before, after in self.gaps]


def _itl(gaps: Sequence[TokenGap]) -> Percentiles[float]:
    if not gaps:
        raise ConfigError("no token came in time: ask for more --chunks, or larger ones")
    return percentiles([1e3 * (after - before) for before, after in gaps])


def summarise_windows(windows: Sequence[MeasuredWindow]) -> Beside:
    """One condition."""
    waits = [1e3 * wait for window in windows for wait in window.waits]
    seconds = sum(window.end - window.begin for window in windows)
    return Beside(
        itl_ms=_itl([gap for window in windows for gap in window.gaps]),
        during_ms=_itl([gap for window in windows for gap in window.during]),
        arrival_ttft_ms=spread(waits) if waits else None,
        tokens_per_s=sum(len(window.gaps) for window in windows) / seconds,
    )


def ratios_to_alone(windows: Mapping[str, Sequence[MeasuredWindow]]) -> dict[str, ToAlone]:
    """Per condition with arrivals."""
    alone = [_itl(window.gaps) for window in windows["alone"]]

    def ratios(own: Sequence[Percentiles[float]]) -> Percentiles[Spread]:
        pairs = list(zip(own, alone, strict=True))
        return Percentiles(
            spread([one.p50 / base.p50 for one, base in pairs]),
            spread([one.p95 / base.p95 for one, base in pairs]),
            spread([one.max / base.max for one, base in pairs]),
        )

    return {
        name: ToAlone(
            ratios([_itl(window.gaps) for window in own]), ratios([_itl(window.during) for window in own])
        )
        for name, own in windows.items()
        if name != "alone"
    }
