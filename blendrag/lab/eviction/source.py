"""Traces made of a file: block traces and our own log as they are, dialogues by LPC's workload generator
(section 4.1), question sets by popularity (:mod:`blendrag.lab.questions`)."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, count, pairwise
from pathlib import Path

import numpy as np

from blendrag.errors import ConfigError, PredictorError, SourceError
from blendrag.lab.eviction.trace import Dialog, Request, RequestTrace, read_dialogs, read_log, read_mooncake
from blendrag.lab.options import EvictionOptions
from blendrag.lab.questions import (
    Embedded,
    Popularity,
    embedded,
    four_characters,
    read_azure,
    read_questions,
    retrieved,
)
from blendrag.lab.records import fields_of, numbered_lines, read_text
from blendrag.settings import Settings

Forecasts = Callable[[RequestTrace], Sequence[float] | None]

_SQLITE = b"SQLite format 3\0"
BLOCK = 16  # tokens, as in vLLM
# A request takes so many seconds, and so many for each token of its answer: fixed, so that every policy is
# asked for the same at the same time.
_PREFILL_S, _DECODE_S = 0.2, 0.02


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


def open_source(options: EvictionOptions) -> TraceSource:
    """Open a source: block traces (Mooncake's) and our own log as they are, dialogues and question sets as
    the options say. Raises SourceError, naming file and line; ConfigError for options of others."""
    path = options.trace
    fields = _first_fields(path)
    if fields & {"log", "hash_ids", "turns"} and (options.paths or options.turnovers):
        raise ConfigError(f"--paths, --turnovers: {path} is no question set")
    if fields & {"log", "hash_ids"}:
        trace = read_log(path) if "log" in fields else read_mooncake(path)
        return TraceSource(lambda seed: trace, generated=False)
    return _dialogs(options) if "turns" in fields else _questions(options)


def _first_fields(path: Path) -> set[str]:
    """Return the names of what the first record of the file has; none if it is no sequence of records: the
    reader of question sets says what is wrong with one that is none."""
    with suppress(OSError), path.open("rb") as file:
        if file.read(len(_SQLITE)) == _SQLITE:
            return {"log"}
    lines = numbered_lines(read_text(path))
    if not lines:
        raise SourceError(f"{str(path)!r} is empty")
    return fields_of(lines[0][1]) or set()


def _questions(options: EvictionOptions) -> TraceSource:
    times = read_azure(options.arrivals) if options.arrivals else None
    try:
        questions = read_questions(options.trace)
    except SourceError as error:
        raise SourceError(f"{error} (other traces have hash_ids or turns)") from error
    corpus = embedded(questions, Settings.load().embedder)
    return TraceSource(
        lambda seed: retrieval_trace(corpus, options, seed=seed, arrivals=times, name=options.trace.name),
        generated=True,
        notes=(f"questions are drawn with popularity rank**-{options.zipf:g}",),
    )


def _dialogs(options: EvictionOptions) -> TraceSource:
    dialogs, name, seconds = read_dialogs(options.trace), options.trace.name, options.seconds
    forecasts: Forecasts = _no_forecasts
    notes: tuple[str, ...] = ()
    if any(policy.startswith("lpc") for policy in options.names):  # for which an embedder has to be loaded
        dialogs, forecasts, notes = _predicted(dialogs, name)
    return TraceSource(
        lambda seed: dialog_trace(dialogs, seconds=seconds, seed=seed, name=name), True, forecasts, notes
    )


def _predicted(dialogs: list[Dialog], name: str) -> tuple[list[Dialog], Forecasts, tuple[str, ...]]:
    """Return the conversations that the predictor has not seen, its forecasts, and a note on both. Without a
    predictor: all, none, and why."""
    from blendrag.eviction.fitted import fitted_file, load_fitted
    from blendrag.forecast.background import Predictor
    from blendrag.forecast.conversation import Window
    from blendrag.forecast.features import features_of
    from blendrag.lab.eviction.fit_predictor import unseen

    file = fitted_file(Settings.load().cache_dir)
    try:
        predictor = Predictor.load(file, features_of)
    except PredictorError as error:
        return dialogs, _no_forecasts, (f"lpc is LRU here: {error}",)
    held_out = unseen(dialogs, load_fitted(file).facts.get("lpc", {}))
    if not held_out:
        raise ConfigError(f"the predictor in {str(file)!r} was fitted to all conversations of {name}")

    def forecasts(trace: RequestTrace) -> Sequence[float]:
        rows = predictor.features.rows([Window.of(request.prompts) for request in trace.requests])
        assert predictor.classifier is not None
        return predictor.classifier.probability(rows).tolist()

    whole = len(held_out) == len(dialogs)
    of = "the whole file" if whole else "those of its file that the predictor has not seen"
    return held_out, forecasts, (f"{len(held_out):,} conversations: {of}",)


def dialog_trace(
    dialogs: Sequence[Dialog],
    *,
    seconds: float,
    gap_s: float = 100.0,
    active: int = 200,
    system_tokens: int = 64,
    seed: int = 0,
    tokens: Callable[[str], int] = four_characters,
    name: str = "dialogs",
) -> RequestTrace:
    """Return requests of conversations that come and go, for so many ``seconds``.

    Each of ``active`` seats (N_conv) takes the next dialogue in an order drawn by ``seed``; the first ones
    begin spread over one mean gap, and a seat that becomes free is taken again after one more gap. gap_s:
    mean of the exponential pause between an answer and the user's next prompt (lambda_chat). No dialogue
    comes twice: when all are used up, the trace ends early. Those without a user are left out.
    Blocks are of 16 tokens of the system prompt and the growing history; blocks that are not yet full are not
    cached. Apart from the system prompt, no two conversations share any.
    """
    dialogs = [dialog for dialog in dialogs if dialog.prompts]
    rng = np.random.default_rng(seed)
    coming = (deque(_turns(dialogs[at], system_tokens, tokens)) for at in rng.permutation(len(dialogs)))
    begins = np.sort(rng.uniform(0.0, gap_s, min(active, len(dialogs)))).tolist()
    numbers = count()
    waiting = [(at, next(numbers), turns) for at, turns in zip(begins, coming, strict=False)]
    requests: list[Request] = []
    while waiting and waiting[0][0] < seconds:
        at, number, turns = heapq.heappop(waiting)
        request = turns.popleft()
        requests.append(replace(request, at=at, finished=at + request.finished))
        after = requests[-1].finished + float(rng.exponential(gap_s))
        if turns:
            heapq.heappush(waiting, (after, number, turns))
        elif another := next(coming, None):
            heapq.heappush(waiting, (after, next(numbers), another))
    return RequestTrace(name, requests, prefix=True, unit="tokens")


def _turns(dialog: Dialog, before: int, tokens: Callable[[str], int]) -> Iterator[Request]:
    """Yield a dialogue's requests, each as if it came at 0. before: tokens of the system prompt."""
    shared, begin = before // BLOCK, 0
    asked = [place for place, turn in enumerate(dialog.turns) if turn.role == "user"]
    for turn, (place, end) in enumerate(pairwise([*asked, len(dialog.turns)]), start=1):
        before += sum(tokens(each.text) for each in dialog.turns[begin : place + 1])
        answered = sum(tokens(each.text) for each in dialog.turns[place + 1 : end])
        prompt, whole = before // BLOCK, (before + answered) // BLOCK
        before, begin = before + answered, end
        yield Request(
            0.0,
            tuple(f"system:{i}" if i < shared else f"{dialog.id}:{i}" for i in range(whole)),
            (BLOCK,) * whole,
            answer=whole - prompt,
            finished=_PREFILL_S + _DECODE_S * answered,
            conversation=dialog.id,
            prompts=dialog.prompts[:turn],
        )


def retrieval_trace(
    corpus: Embedded,
    load: EvictionOptions,
    *,
    seed: int = 0,
    arrivals: Sequence[float] | None = None,
    name: str = "retrieval",
) -> RequestTrace:
    """Return requests for the ``top_k`` chunks closest (cosine) to questions drawn by popularity.

    ``arrivals``: seconds, ascending; instead of Poisson ones. Which articles and questions are the popular
    ones is drawn by ``seed``.
    """
    rng = np.random.default_rng(seed)
    if arrivals is None:
        gaps = rng.exponential(1.0 / load.rate, int(load.rate * load.seconds * 1.5) + 100)
        arrivals = np.cumsum(gaps).tolist()
    popularity = [Popularity(corpus.article, load.zipf, rng) for _ in range(load.turnovers + 1)]
    found = retrieved(corpus, load.top_k)
    requests = []
    for at in arrivals:
        if at >= load.seconds:
            break
        chunks = found[popularity[int(at / load.seconds * len(popularity))].draw()]
        keys = tuple(f"chunk:{chunk}" for chunk in chunks)
        if load.paths:
            keys = tuple(accumulate(keys, "{} {}".format))
        requests.append(Request(at, keys, tuple(corpus.sizes[chunk] for chunk in chunks)))
    return RequestTrace(name, requests, prefix=load.paths, unit="tokens", tree=load.paths)
