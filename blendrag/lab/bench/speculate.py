"""Savings of answers begun from provisional documents, while the final ones are waited for, and their cost
where these are others (RAGCache, section 5.3; ``bench ttft --speculate``)."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from statistics import median

from rich.table import Table

from blendrag.chat.chat import Chat
from blendrag.chat.request import ChatRequest
from blendrag.engine.client.engine import Engine
from blendrag.lab.arms import reset
from blendrag.lab.bootstrap import Interval, difference
from blendrag.lab.experiment import in_turn
from blendrag.lab.options import SpeculateOptions
from blendrag.lab.prompts import QUESTIONS
from blendrag.lab.results import EngineResults, Setup, where
from blendrag.lab.running import blending_engine
from blendrag.lab.scratch import temporary_folder
from blendrag.lab.texts import text_pieces
from blendrag.models import load_tokenizer
from blendrag.progress import SILENT, Progress
from blendrag.prompt import decode
from blendrag.serving.library import Library
from blendrag.serving.prefill import PrefillReport
from blendrag.settings import Settings
from blendrag.store.stack import TierSpec
from blendrag.tables import table_with

ACCEPTED = (0.0, 0.5, 1.0)
_WAITS = (0.5, 1.0, 2.0)  # in TTFTs
_CALIBRATE = 3
_POOL = 4  # chunks that there are, per chunk of a prompt
_ANSWER_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Waited:
    """A wait for the final documents, in seconds. ttft_s: median, where nothing is begun before they are
    there. saved_s: by the share of provisional lists that are the final ones, mean over questions."""

    wait_s: float
    ttft_s: float
    saved_s: dict[float, Interval]


@dataclass(frozen=True, slots=True)
class SpeculateResults(EngineResults[SpeculateOptions]):
    waits: tuple[Waited, ...]

    def parts(self) -> Iterator[Table | str]:
        """Yield a row per wait and share."""
        table = table_with("waits", "TTFT", "come true", "saved", "of TTFT", "95 %")
        for waited in self.waits:
            for accepted, saved in waited.saved_s.items():
                wait, ttft, gain = (
                    f"{1e3 * seconds:,.0f} ms" for seconds in (waited.wait_s, waited.ttft_s, saved.mean)
                )
                mean, low, high = (
                    f"{seconds / waited.ttft_s:.0%}" for seconds in (saved.mean, saved.low, saved.high)
                )
                table.add_row(wait, ttft, f"{accepted:.0%}", gain, mean, f"{low} to {high}")
        options, machine = self.setup.options, self.setup.machine
        yield table
        yield (
            f"{options.chunks} x {options.chunk_tokens} tokens, {options.repeats} questions each; a"
            f" provisional list that does not come true has another order. {where(machine)}."
        )


@dataclass(frozen=True, slots=True)
class _Trial:
    """A trial. final: what is asked. other: the same with its documents in another order. comes: by the share
    that does, whether ``final`` is the provisional prompt, too."""

    final: str
    other: str
    comes: Mapping[float, bool]


def run_speculate(settings: Settings, options: SpeculateOptions, progress: Progress) -> SpeculateResults:
    """Measure what begun answers save. Raises ConfigError, SourceError, ModelError, PromptTooLongError,
    StoreError, EngineError."""
    with (
        blending_engine(settings, progress) as engine,
        _library(settings, engine, options) as (library, pool),
    ):
        chat, rng = Chat(settings, library=library), random.Random(options.seed)
        progress.note("calibrating")
        tuned = [_seconds(engine, chat, each) for each in _trials(pool, rng, options.chunks, _CALIBRATE)]
        waits = []
        for wait_s in (factor * median(tuned) for factor in _WAITS):
            arms = {None: chat} | {accepted: Chat(settings, library=library) for accepted in ACCEPTED}
            took: dict[float | None, list[float]] = {accepted: [] for accepted in arms}
            trials = _trials(pool, rng, options.chunks, options.repeats + 1)
            for turn in in_turn(arms, trials, progress):
                seconds = _seconds(engine, turn.arm, turn.trial, turn.key, wait_s)
                if not turn.warms_up:
                    took[turn.key].append(seconds)
            plain = took[None]
            saved = {accepted: difference(plain, took[accepted]) for accepted in ACCEPTED}
            waits.append(Waited(wait_s, median(plain) - wait_s, saved))
        return SpeculateResults(tuple(waits), setup=Setup.of(engine, settings, options, ()))


@contextmanager
def _library(
    settings: Settings, engine: Engine, options: SpeculateOptions
) -> Iterator[tuple[Library, list[str]]]:
    """Open a library whose texts are prefilled; give it and these."""
    tokenizer = load_tokenizer(engine.model_path)
    pieces = text_pieces(tokenizer, _POOL * options.chunks, options.chunk_tokens)
    texts = [decode(tokenizer, ids).strip() for ids in pieces]
    with (
        temporary_folder(settings, TierSpec(kind="disk")) as folder,
        closing(Library(folder / "kv", settings)) as library,
    ):
        library.texts.register({str(at): [text] for at, text in enumerate(texts)})
        library.texts.prefill(PrefillReport(), SILENT)
        yield library, texts


def _trials(pool: list[str], rng: random.Random, chunks: int, count: int) -> list[_Trial]:
    comes: dict[float, list[bool]] = {}
    for accepted in ACCEPTED:
        kept = [at < accepted * (count - 1) for at in range(count - 1)]
        rng.shuffle(kept)
        comes[accepted] = [accepted > 0.0, *kept]  # the first one warms up
    trials = []
    for number in range(count):
        chosen = rng.sample(pool, chunks)
        question = QUESTIONS[number % len(QUESTIONS)]
        final, other = ("\n\n".join((*texts, question)) for texts in (chosen, [*chosen[1:], chosen[0]]))
        trials.append(_Trial(final, other, {accepted: comes[accepted][number] for accepted in ACCEPTED}))
    return trials


def _seconds(
    engine: Engine, chat: Chat, trial: _Trial, accepted: float | None = None, wait_s: float = 0.0
) -> float:
    """Return the seconds from the question to its first token; accepted: None if nothing is begun before."""

    def request(prompt: str) -> ChatRequest:
        messages = [{"role": "user", "content": prompt}]
        return chat.request(messages, max_tokens=_ANSWER_TOKENS, other={"ignore_eos": True})

    reset(engine)
    begin = time.perf_counter()
    if accepted is not None:
        comes = trial.comes[accepted]
        expected = chat.speculate(request(trial.final if comes else trial.other))
    time.sleep(max(0.0, begin + wait_s - time.perf_counter()))
    if accepted is not None and not comes:
        expected.end()
    with closing(chat.stream(request(trial.final))) as pieces:
        next(pieces)
        return time.perf_counter() - begin
