"""From a file to traces: what is in it decides what is made of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from blendrag.errors import ConfigError, PredictorError, SourceError
from blendrag.forecast.trace_log import parts
from blendrag.lab.eviction.readers import (
    AZURE_COLUMNS,
    Dialog,
    read_azure,
    read_dialogs,
    read_mooncake,
    read_questions,
)
from blendrag.lab.eviction.trace import RequestTrace
from blendrag.lab.eviction.workloads import DialogLoad, RetrievalLoad, dialog_trace, embedded, retrieval_trace
from blendrag.lab.records import numbered_lines

Forecasts = Callable[[RequestTrace], Sequence[float] | None]


@dataclass(frozen=True, slots=True)
class Workload:
    """How a file without times or blocks becomes a trace.

    seconds: its length. zipf: popularity of articles and of the questions of each, rank**-zipf. arrivals:
    file with the times of questions (Azure's). paths, turnovers: see :class:`RetrievalLoad`.
    """

    seconds: float = 1200.0
    zipf: float = 1.0
    arrivals: Path | None = None
    paths: bool = False
    turnovers: int = 0


def _no_forecasts(trace: RequestTrace) -> None:
    return None


@dataclass(frozen=True, slots=True)
class TraceSource:
    """trace: by seed. generated: whether the seed makes a difference. forecasts: of a trace, the predictor's.
    notes: what a reader of the results should know."""

    trace: Callable[[int], RequestTrace]
    generated: bool
    forecasts: Forecasts = _no_forecasts
    notes: tuple[str, ...] = ()


def open_source(path: Path, workload: Workload, *, predicted: bool = True) -> TraceSource:
    """Block traces (Mooncake's, or a store's log) as they are, dialogues and question sets as ``workload``
    says.

    predicted: whether forecasts are wanted, for which an embedder has to be loaded. Raises SourceError,
    naming file and line; ConfigError for a file of times alone.
    """
    files = parts(path)
    first = _first(files[0])
    if first.keys() & {"hash_ids", "turns"} and (workload.paths or workload.turnovers):
        raise ConfigError(f"--paths, --turnovers: {path} is no question set")
    if "hash_ids" in first:
        trace = read_mooncake(*files)
        return TraceSource(lambda seed: trace, generated=False)
    if "turns" in first:
        return _dialogs(path, workload, predicted)
    if AZURE_COLUMNS[0] in first:
        raise ConfigError(
            f"--trace {path}: it says when, but not what was asked: take a question set as --trace, and this"
            " file as --arrivals"
        )
    return _questions(path, workload)


def read_trace(path: Path) -> RequestTrace:
    """A block trace or a store's log. Raises SourceError, naming the file, for whatever else it is."""
    files = parts(path)
    if "hash_ids" not in _first(files[0]):
        raise SourceError(f"{str(path)!r} is no trace of prompts: its first line has no hash_ids")
    return read_mooncake(*files)


def _first(path: Path) -> dict[str, Any]:
    """What the first record of the file has; nothing if the file is no sequence of records."""
    found = next(numbered_lines(path), None)
    if found is None:
        raise SourceError(f"{str(path)!r} is empty")
    _, line = found
    if line.lstrip(b"\xef\xbb\xbf").startswith(AZURE_COLUMNS[0].encode()):
        return {AZURE_COLUMNS[0]: ""}
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        if line.strip() in (b"{", b"["):
            return {}
        raise SourceError(f"{str(path)!r}, line {found[0]}: not JSON: {error}") from None
    return record if isinstance(record, dict) else {}


def _questions(path: Path, workload: Workload) -> TraceSource:
    from blendrag.forecast.features import Features
    from blendrag.forecast.folder import default_folder
    from blendrag.forecast.words import open_embedder
    from blendrag.lab.eviction.vectors import DiskCache
    from blendrag.settings import Settings

    name = Settings.load().embedder
    arrivals = read_azure(workload.arrivals) if workload.arrivals else None
    features = Features(open_embedder(name), DiskCache(default_folder(), name))
    corpus = embedded(read_questions(path), features)
    load = RetrievalLoad(
        seconds=workload.seconds, zipf=workload.zipf, paths=workload.paths, turnovers=workload.turnovers
    )
    return TraceSource(
        lambda seed: retrieval_trace(corpus, load, seed=seed, arrivals=arrivals, name=path.name),
        generated=True,
        notes=(f"questions are drawn with popularity rank**-{workload.zipf:g}",),
    )


def _dialogs(path: Path, workload: Workload, predicted: bool) -> TraceSource:
    dialogs = read_dialogs(path)
    if not any(dialog.prompts for dialog in dialogs):
        raise SourceError(f"{str(path)!r}: in none of its conversations does a user say anything")
    load = DialogLoad(seconds=workload.seconds)
    source = TraceSource(partial(_dialog_trace, dialogs, load, path.name), generated=True)
    return _with_predictor(source, dialogs, load, path.name) if predicted else source


def _dialog_trace(dialogs: Sequence[Dialog], load: DialogLoad, name: str, seed: int) -> RequestTrace:
    return dialog_trace(dialogs, load, seed=seed, name=name)


def _with_predictor(
    source: TraceSource, dialogs: Sequence[Dialog], load: DialogLoad, name: str
) -> TraceSource:
    """Forecasts, and a trace of conversations that the predictor has not seen; without one, a note."""
    from blendrag.forecast.classifier import load_manifest
    from blendrag.forecast.conversation import Window
    from blendrag.forecast.folder import default_folder
    from blendrag.forecast.predictor import Predictor
    from blendrag.lab.eviction.learn_predictor import unseen
    from blendrag.lab.eviction.vectors import DiskCache

    folder = default_folder()
    try:
        manifest = load_manifest(folder)
        predictor = Predictor.load(folder, cache=DiskCache(folder, manifest.embedder))
    except PredictorError as error:
        return replace(source, notes=(f"lpc is LRU here: {error}",))
    held_out = unseen(dialogs, manifest)
    if not held_out:
        raise ConfigError(f"the predictor in {str(folder)!r} was trained on all conversations of {name}")

    def forecasts(trace: RequestTrace) -> Sequence[float]:
        windows = [Window.of(request.prompts) for request in trace.requests]
        answers: list[float] = predictor.probability(windows).tolist()
        return answers

    seen = len(held_out) < len(dialogs)
    note = f"{len(held_out):,} conversations: " + (
        "those of its training file that the predictor has not seen" if seen
        else "the whole file; the predictor was trained on another one"
    )  # fmt: skip
    trace = partial(_dialog_trace, held_out, load, name)
    return TraceSource(trace, generated=True, forecasts=forecasts, notes=(note,))
