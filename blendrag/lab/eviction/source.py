"""Traces made of a file: what is in it decides what is made of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from blendrag.errors import ConfigError, PredictorError, SourceError
from blendrag.lab.eviction.readers import Dialog, read_dialogs, read_log, read_mooncake
from blendrag.lab.eviction.trace import RequestTrace
from blendrag.lab.eviction.workloads import DialogLoad, RetrievalLoad, dialog_trace, retrieval_trace
from blendrag.lab.questions import AZURE_COLUMNS, embedded, read_azure, read_questions
from blendrag.lab.records import numbered_lines
from blendrag.settings import Settings

Forecasts = Callable[[RequestTrace], Sequence[float] | None]

_SQLITE = b"SQLite format 3\0"


def _no_forecasts(trace: RequestTrace) -> None:
    return None


@dataclass(frozen=True, slots=True)
class TraceSource:
    """A source of traces. trace: by seed. generated: whether the seed makes a difference. forecasts: of a
    trace, the predictor's. notes: what a reader of the results should know."""

    trace: Callable[[int], RequestTrace]
    generated: bool
    forecasts: Forecasts = _no_forecasts
    notes: tuple[str, ...] = ()


def open_source(
    path: Path, load: RetrievalLoad, arrivals: Path | None = None, *, predicted: bool = True
) -> TraceSource:
    """Open a source: block traces (Mooncake's) and our own log as they are, dialogues and question sets as
    ``load`` says.

    arrivals: a file with the times of questions (Azure's). predicted: whether forecasts are wanted, for which
    an embedder has to be loaded. Raises SourceError, naming file and line; ConfigError for a file of times
    alone.
    """
    first = _first(path)
    if first.keys() & {"log", "hash_ids", "turns"} and (load.paths or load.turnovers):
        raise ConfigError(f"--paths, --turnovers: {path} is no question set")
    if first.keys() & {"log", "hash_ids"}:
        trace = read_log(path) if "log" in first else read_mooncake(path)
        return TraceSource(lambda seed: trace, generated=False)
    if "turns" in first:
        return _dialogs(path, load.seconds, predicted)
    if AZURE_COLUMNS[0] in first:
        raise ConfigError(
            f"--trace {path}: it says when, but not what was asked: take a question set as --trace, and this"
            " file as --arrivals"
        )
    return _questions(path, load, arrivals)


def _first(path: Path) -> dict[str, Any]:
    """Return what the first record of the file has; nothing if the file is no sequence of records."""
    found = next(numbered_lines(path), None)
    if found is None:
        raise SourceError(f"{str(path)!r} is empty")
    _, line = found
    if line.startswith(_SQLITE):
        return {"log": ""}
    if line.lstrip(b"\xef\xbb\xbf").startswith(AZURE_COLUMNS[0].encode()):
        return {AZURE_COLUMNS[0]: ""}
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        if line.strip() in (b"{", b"["):
            return {}
        raise SourceError(f"{str(path)!r}, line {found[0]}: not JSON: {error}") from None
    return record if isinstance(record, dict) else {}


def _questions(path: Path, load: RetrievalLoad, arrivals: Path | None) -> TraceSource:
    times = read_azure(arrivals) if arrivals else None
    try:
        questions = read_questions(path)
    except SourceError as error:
        raise SourceError(f"{error} (other traces have hash_ids or turns)") from error
    corpus = embedded(questions, Settings.load().embedder)
    return TraceSource(
        lambda seed: retrieval_trace(corpus, load, seed=seed, arrivals=times, name=path.name),
        generated=True,
        notes=(f"questions are drawn with popularity rank**-{load.zipf:g}",),
    )


def _dialogs(path: Path, seconds: float, predicted: bool) -> TraceSource:
    dialogs = read_dialogs(path)
    if not any(dialog.prompts for dialog in dialogs):
        raise SourceError(f"{str(path)!r}: in none of its conversations does a user say anything")
    load = DialogLoad(seconds=seconds)
    source = TraceSource(partial(_dialog_trace, dialogs, load, path.name), generated=True)
    return _with_predictor(source, dialogs, load, path.name) if predicted else source


def _dialog_trace(dialogs: Sequence[Dialog], load: DialogLoad, name: str, seed: int) -> RequestTrace:
    return dialog_trace(dialogs, load, seed=seed, name=name)


def _with_predictor(
    source: TraceSource, dialogs: Sequence[Dialog], load: DialogLoad, name: str
) -> TraceSource:
    """Return forecasts, and a trace of conversations that the predictor has not seen; without one, a note."""
    from blendrag.eviction.fitted import fitted_file, load_fitted
    from blendrag.forecast.background import Predictor
    from blendrag.forecast.conversation import Window
    from blendrag.forecast.features import features_of
    from blendrag.lab.eviction.fit_predictor import unseen

    file = fitted_file(Settings.load().cache_dir)
    try:
        predictor = Predictor.load(file, features_of)
    except PredictorError as error:
        return replace(source, notes=(f"lpc is LRU here: {error}",))
    held_out = unseen(dialogs, load_fitted(file).facts.get("lpc", {}))
    if not held_out:
        raise ConfigError(f"the predictor in {str(file)!r} was fitted to all conversations of {name}")

    def forecasts(trace: RequestTrace) -> Sequence[float]:
        rows = predictor.features.rows([Window.of(request.prompts) for request in trace.requests])
        assert predictor.classifier is not None
        answers: list[float] = predictor.classifier.probability(rows).tolist()
        return answers

    of = (
        "those of its file that the predictor has not seen"
        if len(held_out) < len(dialogs)
        else "the whole file"
    )
    trace = partial(_dialog_trace, held_out, load, name)
    return TraceSource(trace, True, forecasts, (f"{len(held_out):,} conversations: {of}",))
