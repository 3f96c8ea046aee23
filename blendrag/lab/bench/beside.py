"""Head-of-line blocking: what running answers, and a short plain prompt, lose while a long one is computed,
or chunks are ingested (``bench load --beside``)."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from blendrag.engine.client.engine import Engine
from blendrag.engine.wire.recipe import Recipe
from blendrag.errors import ConfigError
from blendrag.lab import canvas
from blendrag.lab.arms import check_blended, recipe_of, reset
from blendrag.lab.bench.timed import Timed, ask_timed, exactly, stop
from blendrag.lab.experiment import in_turn
from blendrag.lab.options import BesideOptions
from blendrag.lab.prompts import QUESTIONS, Prompt, PromptMaker, check_prompts
from blendrag.lab.results import EngineResults, Setup, where
from blendrag.lab.running import blending_engine
from blendrag.lab.scratch import ScratchStore, scratch_store
from blendrag.lab.statistics import Percentiles, Spread, percentiles, spread
from blendrag.lab.texts import text_pieces
from blendrag.progress import Progress
from blendrag.prompt import encode_document
from blendrag.settings import Settings
from blendrag.store.contexts import Chunk
from blendrag.store.stack import TierSpec
from blendrag.tables import table_with

CONDITIONS = ("alone", "full", "blended", "slow", "ingest")
DECODES = 2  # answers that run all the time, one begun when one ends
DECODE_TOKENS = 200
SLOW_MB_S = 15
INTO_S = 0.4  # share of a long prompt's time after which the short one is sent
ALONE_S = 3.0  # seconds for which answers are measured with nothing beside them
_POOL = 2  # chunks in the store, per chunk of a prompt
_LOOK_S = 0.02  # seconds between looks whether all decodes run
_STORY = "Write a long story about a lighthouse keeper, a storm and the letter that came with it. Part {}."


@dataclass(frozen=True, slots=True)
class Beside:
    """Results of one condition. itl_ms: between tokens of running answers, while a long prompt waits for its
    first token, or chunks to be stored; arrival_ms: for so long. short_ms: a short prompt's TTFT, sent to an
    engine that does nothing but such a long one. itl_p95_ratio, short_ratio: to ``alone``, repeat by repeat.
    """

    itl_ms: Percentiles
    itl_p95_ratio: Spread
    arrival_ms: Spread | None
    short_ms: Spread
    short_ratio: Spread


@dataclass(frozen=True, slots=True)
class BesideResults(EngineResults[BesideOptions]):
    """Results of all conditions: alone, full (full prefills arrive), blended (blends of the same prompts),
    slow (these from a slow disk), ingest (their chunks are prefilled and stored). trace: per condition
    (seconds, ms) of every token of the last repeat: since its beginning, and since the token before."""

    conditions: dict[str, Beside]
    trace: dict[str, list[tuple[float, float]]]

    def parts(self) -> Iterator[Table | str]:
        """Yield a row per condition: running answers, a short prompt, and both by what they are alone."""
        answers = table_with("beside", "it takes ms", "ITL p50", "p95", "max ms", "p95 / alone", "p10-p90")
        short = table_with("beside", "short ms", "p10-p90", "/ alone", "p10-p90")
        for name, own in self.conditions.items():
            itl, takes = own.itl_ms, f"{own.arrival_ms.median:,.0f}" if own.arrival_ms else ""
            of_answers, of_short = (
                each.shown(".1f") if takes else ("", "") for each in (own.itl_p95_ratio, own.short_ratio)
            )
            answers.add_row(name, takes, *(f"{ms:,.0f}" for ms in (itl.p50, itl.p95, itl.max)), *of_answers)
            short.add_row(name, *own.short_ms.shown(), *of_short)
        setup, options = self.setup, self.setup.options
        yield from (answers, short)
        yield (
            f"ITL: between two tokens of {DECODES} running answers, alone, while a full prefill, a blend of"
            f" the same prompt, or one from a disk of {SLOW_MB_S} MB/s waits for its first token, or while"
            f" its chunks are stored. short: TTFT of a short plain prompt, sent {1e3 * INTO_S:.0f} ms into"
            f" such a one, when the engine does nothing else. {options.repeats} repeats: {options.chunks}"
            f" chunks of {options.chunk_tokens} tokens, {setup.settings.blending.recompute_ratio:.0%}"
            f" recomputed. {where(setup.machine)}."
        )

    def draw(self, path: Path) -> None:
        """Write the picture: a point per token, a panel per condition, of the last repeat."""
        traces = self.trace
        figure = canvas.new_figure(13, 3.4)
        panels = figure.subplots(1, len(traces), sharey=True)
        for axes, (name, trace) in zip(panels, traces.items(), strict=True):
            seconds, latencies = [at for at, _ in trace], [latency for _, latency in trace]
            axes.scatter(seconds, latencies, s=5, color=_LOOKS[name][0])
            axes.set_yscale("log")
            canvas.finish_axes(
                axes, _LOOKS[name][1], "s", "ms from token to token" if axes is panels[0] else ""
            )
        canvas.save(figure, path, self.setup.machine)


def run_beside(settings: Settings, options: BesideOptions, progress: Progress) -> BesideResults:
    """Measure all conditions. Raises ConfigError, ModelError, PromptTooLongError, StoreError, EngineError."""
    with blending_engine(settings, progress) as engine:
        maker = PromptMaker.of(engine, settings)
        pieces = text_pieces(maker.tokenizer, _POOL * options.chunks, options.chunk_tokens)
        progress.note("ingest")
        with (
            scratch_store(engine, settings, pieces, TierSpec(kind="ram")) as store,
            scratch_store(
                engine, settings, pieces, TierSpec(kind="disk", throttle=SLOW_MB_S * 1_000_000)
            ) as slow,
        ):
            trials = maker.trials(store.chunks, options.chunks, 1 + options.repeats, options.seed)
            prompts = [trial.prompt for trial in trials]
            stories = [encode_document(maker.tokenizer, _STORY.format(number)) for number in range(DECODES)]
            check_prompts(prompts, engine.max_model_len)
            check_prompts([Prompt(story, ()) for story in stories], engine.max_model_len, DECODE_TOKENS)
            recipes = {"blended": recipe_of(settings, store.id), "slow": recipe_of(settings, slow.id)}
            twins = {one.key: other for one, other in zip(store.chunks, slow.chunks, strict=True)}
            beside = _Beside(engine, recipes, stories, maker.make((), QUESTIONS[0]), slow, twins)
            windows: dict[str, list[MeasuredWindow]] = {condition: [] for condition in CONDITIONS}
            for turn in in_turn(dict.fromkeys(CONDITIONS), prompts, progress):
                found = asyncio.run(beside.measure(turn.key, turn.trial))
                if not turn.warms_up:
                    windows[turn.key].append(found)
        return BesideResults(
            summarise_windows(windows),
            {name: own[-1].trace for name, own in windows.items()},
            setup=Setup.of(engine, settings, options, prompts),
        )


@dataclass
class _Beside:
    """One measurement, a window per condition and repeat. slow: a second store. twins: its chunks, by keys of
    the prompts."""

    engine: Engine
    recipes: Mapping[str, Recipe]
    stories: Sequence[Sequence[int]]
    short: Prompt
    slow: ScratchStore
    twins: Mapping[str, Chunk]
    names: Iterator[int] = field(default_factory=itertools.count)

    async def measure(self, condition: str, prompt: Prompt) -> MeasuredWindow:
        """Measure answers beside a long prompt, then a short one beside it."""
        reset(self.engine)
        decodes: list[list[Timed]] = [[] for _ in self.stories]
        tasks = [
            asyncio.create_task(self._decode(story, own))
            for story, own in zip(self.stories, decodes, strict=True)
        ]
        try:
            await _all_have_a_token(decodes, tasks)
            arrival = Timed(time.perf_counter())
            await self._arrive(condition, prompt, arrival)
            await _all_have_a_token(decodes, tasks, arrival.tokens[0])  # what it ends in is lost to it, too
        finally:
            await stop(self.engine, tasks)
        return MeasuredWindow(
            arrival, [one for own in decodes for one in own], await self._beside_short(condition, prompt)
        )

    async def _beside_short(self, condition: str, prompt: Prompt) -> float:
        """Return the seconds to the first token of a short prompt that is sent into the long one."""
        long = []
        try:
            if condition != "alone":
                long = [asyncio.create_task(self._arrive(condition, prompt, Timed(time.perf_counter())))]
                await asyncio.sleep(INTO_S)
            short = Timed(time.perf_counter())
            await self._ask(self.short.token_ids, short)
            await asyncio.gather(*long)
        finally:
            await stop(self.engine, long)
        return short.tokens[0] - short.due

    async def _decode(self, story: Sequence[int], decodes: list[Timed]) -> None:
        """Generate one answer after the other."""
        while True:
            decodes.append(Timed(time.perf_counter()))
            await ask_timed(self.engine, story, exactly(DECODE_TOKENS), decodes[-1])

    async def _arrive(self, condition: str, prompt: Prompt, timed: Timed) -> None:
        """Wait for a first token; or store chunks, or do nothing for a while."""
        spans = prompt.spans
        if condition == "alone":
            await asyncio.sleep(ALONE_S)
        elif condition == "ingest":
            await asyncio.to_thread(_ingest_again, self.slow, [self.twins[key] for key, *_ in spans])
        if condition in ("alone", "ingest"):
            timed.tokens.append(time.perf_counter())
            return
        if condition == "slow":
            spans = tuple((self.twins[key].key, start, length) for key, start, length in spans)
            await asyncio.to_thread(self.slow.make_cold)
        recipe = self.recipes.get(condition)
        await self._ask(prompt.token_ids, timed, recipe and replace(recipe, spans=spans))
        if recipe is not None:
            check_blended("what arrived", timed.report)

    async def _ask(self, token_ids: Sequence[int], timed: Timed, recipe: Recipe | None = None) -> None:
        """Wait for a first token, in a namespace of its own: nothing of it is in the prefix cache."""
        await ask_timed(self.engine, token_ids, exactly(1), timed, recipe, f"beside-{next(self.names)}")


async def _all_have_a_token(
    decodes: Sequence[Sequence[Timed]], tasks: Sequence[asyncio.Task[None]], after: float = 0.0
) -> None:
    """Wait until each story has a token that came behind ``after``. Raises what a task fails with."""
    while not all(any(one.tokens and one.tokens[-1] > after for one in own) for own in decodes):
        failed, _ = await asyncio.wait(tasks, timeout=_LOOK_S, return_when=asyncio.FIRST_EXCEPTION)
        for task in failed:
            task.result()


def _ingest_again(store: ScratchStore, chunks: Sequence[Chunk]) -> None:
    store.client.delete([chunk.key for chunk in chunks])
    store.ingest(chunks)


# -- numbers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MeasuredWindow:
    """A measured window, in seconds on one clock. arrival: what came beside the answers ``decodes``; short_s:
    a short prompt's TTFT beside another such."""

    arrival: Timed
    decodes: Sequence[Timed]
    short_s: float

    @property
    def trace(self) -> list[tuple[float, float]]:
        """The seconds since the beginning, and the ms since the answer's last token, of each token behind a
        gap that the arrival fell into, between its being due and its first token; by time."""
        begin, end = self.arrival.due, self.arrival.tokens[0]
        gaps = (gap for decode in self.decodes for gap in decode.gaps)
        return sorted(
            (after - begin, 1e3 * (after - before))
            for before, after in gaps
            if before < end and after > begin
        )

    @property
    def itl_ms(self) -> list[float]:
        return [ms for _, ms in self.trace]


def summarise_windows(windows: Mapping[str, Sequence[MeasuredWindow]]) -> dict[str, Beside]:
    """Summarise windows by condition, ``alone`` among them. Raises ConfigError if no token came in one."""
    if not all(window.trace for own in windows.values() for window in own):
        raise ConfigError("no token came in time: ask for more --chunks, or larger ones")

    def ratios(name: str, of: Any) -> Spread:
        pairs = zip(windows[name], windows["alone"], strict=True)
        return spread([of(window) / of(alone) for window, alone in pairs])

    return {
        name: Beside(
            percentiles([ms for window in own for ms in window.itl_ms]),
            ratios(name, lambda window: percentiles(window.itl_ms).p95),
            None
            if name == "alone"
            else spread([1e3 * (window.arrival.tokens[0] - window.arrival.due) for window in own]),
            spread([1e3 * window.short_s for window in own]),
            ratios(name, lambda window: window.short_s),
        )
        for name, own in windows.items()
    }


_LOOKS = {
    "alone": ("#57a773", "nothing beside"),
    "full": (canvas.ARM_COLOURS["full"], "full prefills beside"),
    "blended": (canvas.ARM_COLOURS["blended"], "blends beside"),
    "slow": ("#8f6fb8", f"blends from {SLOW_MB_S} MB/s"),
    "ingest": ("#b8863b", "ingest beside"),
}
