"""Forecasts of which conversations go on, made beside the engine for its store's policies."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from blendrag.errors import PredictorError
from blendrag.eviction import POLICIES
from blendrag.eviction.fitted import fitted_file
from blendrag.forecast.background import BackgroundPredictor, ForecastCounts, Predictor, Record
from blendrag.forecast.conversation import PROMPTS, Window, conversation_id, window_of, without_documents
from blendrag.forecast.features import features_of
from blendrag.forecast.log import Prompt, PromptLog, log_file
from blendrag.prompt import Messages, PromptPlan
from blendrag.serving.session import EngineSession
from blendrag.settings import Settings
from blendrag.store.stack import TierSpec
from blendrag.store.tiers.local import Forecast

FORECASTS = "forecasts"  # name of the forecasts' counters, beside those of tiers
CONVERSATIONS = 4096  # conversations whose chunks are remembered: the latest
CHUNKS = 256  # chunks remembered of each conversation: the latest
AT_ONCE = 32  # keys in one call to the worker, which takes up to 10 us for each key and tier
_on_cpu = partial(features_of, device="cpu")  # an accelerator is the engine's alone
_CHARACTERS = 2048  # characters kept of an earlier prompt: more than the predictor reads of it


def wants_forecasts(stack: Iterable[TierSpec]) -> bool:
    """Return whether a tier of this machine evicts by a policy that goes by forecasts."""
    return any(spec.evicts and POLICIES[spec.policy].uses_forecasts() for spec in stack)


@dataclass(slots=True)
class _Conversation:
    """A conversation, as far as it is remembered. chunks: keys, the latest used last. prompts: the latest,
    where the caller does not keep them."""

    chunks: dict[str, None] = field(default_factory=dict)
    prompts: tuple[str, ...] = ()
    turns: int = 0


class Forecaster:
    """A forecaster of which conversations go on. Made with the engine, ended by :meth:`close`. Thread-safe.

    Without a predictor, or with one that does not work, nothing is told, and the policies are LRU. What goes
    wrong is warned of once, and counted. root: the store's folder, for the log.
    """

    def __init__(self, session: EngineSession, settings: Settings, root: Path) -> None:
        self._session, self._settings, self._root = session, settings, root
        self._conversations: OrderedDict[str, _Conversation] = OrderedDict()
        self._lock = threading.Lock()
        self._log: PromptLog | None = None
        record = self._open_log if settings.outcome_log else None
        self._predictor = BackgroundPredictor(self._load, self._tell, record)

    def answered(
        self, prompt: Messages | str, plan: PromptPlan, conversation: str | None, seconds: float = 0.0
    ) -> None:
        """Note that a prompt was answered, so many seconds after it came: log it, and ask whether its
        conversation goes on. Returns at once."""
        whose, spoken = self._read(prompt, plan, conversation)
        chunks = tuple((key, len(part.token_ids)) for part in plan.segments if (key := part.chunk_key))
        window = None if whose is None else self._noted(whose, plan.cached_keys, spoken)
        if window is not None or (chunks and self._settings.outcome_log):
            self._predictor.ask(Prompt(time.time() - seconds, chunks, whose, window))

    def _noted(self, conversation: str, chunks: Iterable[str], spoken: Window | str) -> Window:
        """Note that a prompt of the conversation had these chunks in this order. Returns what is known of it
        now.

        spoken: the user's prompts so far; or the last one, where those before were given here as well.
        """
        with self._lock:
            one = self._conversations.setdefault(conversation, _Conversation())
            self._conversations.move_to_end(conversation)
            if len(self._conversations) > CONVERSATIONS:
                self._conversations.popitem(last=False)
            for key in chunks:
                one.chunks.pop(key, None)
                one.chunks[key] = None
            for key in list(one.chunks)[:-CHUNKS]:
                del one.chunks[key]
            if not isinstance(spoken, str):
                return spoken
            one.turns += 1
            window = Window((*one.prompts, spoken), one.turns)
            one.prompts = (*one.prompts, _shortened(spoken))[1 - PROMPTS :]
            return window

    @property
    def counts(self) -> ForecastCounts:
        return self._predictor.counts

    def counted(self) -> dict[str, int]:
        """Return the counts as the catalogue keeps them."""
        counts = self._predictor.counts
        whole = {name: getattr(counts, name) for name in ("asked", "answered", "dropped", "unanswered")}
        return {**whole, "busy_ms": round(1e3 * counts.busy_s)}

    def close(self) -> None:
        """End the predictor; what it was not asked in time stays unanswered."""
        self._predictor.close()
        if self._log:
            self._log.close()

    # -- in the predictor's thread ------------------------------------------------------------------------

    def _load(self) -> Predictor:
        try:
            predictor = Predictor.load(fitted_file(self._settings.cache_dir), _on_cpu)
        except PredictorError:
            if not self._settings.outcome_log:
                raise
            predictor = Predictor(_on_cpu(self._settings.embedder), None)  # so that there is something to fit
        predictor.features.rows([Window.of(["Hello"])])  # loads the embedder
        return predictor

    def _open_log(self, predictor: Predictor | None) -> Record:
        self._log = PromptLog(log_file(self._settings.cache_dir))
        embedder = predictor.features.embedder.name if predictor else ""
        return partial(self._log.record, str(self._root.resolve()), embedder=embedder)

    def _read(
        self, prompt: Messages | str, plan: PromptPlan, conversation: str | None
    ) -> tuple[str | None, Window | str]:
        """Return whose prompt it is, and what the user said.

        conversation: the caller's id of it; else it is the one that messages open. A text alone belongs to
        none; of its prompt, what stands behind the last document counts as the user's.
        """
        documents, namespace = [segment.text for segment in plan.cached_segments], self._settings.namespace
        if isinstance(prompt, str):
            spoken = prompt.rpartition(documents[-1])[2] if documents else prompt
            return conversation_id((), conversation, namespace), spoken
        messages = without_documents(prompt, documents)
        return conversation_id(messages, conversation, namespace), window_of(messages)

    def _tell(self, chances: Mapping[str, float]) -> None:
        if (store := self._session.store) is None or not wants_forecasts(self._session.stack):
            return
        with self._lock:  # the ends of prompts first, as policies hear of uses
            forecasts = [
                (conversation, chance, list(reversed(self._conversations[conversation].chunks)))
                for conversation, chance in chances.items()
                if conversation in self._conversations
            ]
        for part in _parts(forecasts):  # waits for each: what requests ask of the worker comes in between
            store.forecast(part)


def _parts(forecasts: Iterable[Forecast]) -> Iterator[list[Forecast]]:
    """Yield the same forecasts, with at most ``AT_ONCE`` keys in each part."""
    part: list[Forecast] = []
    room = AT_ONCE
    for conversation, chance, keys in forecasts:
        while keys:
            part.append((conversation, chance, keys[:room]))
            keys, room = keys[room:], room - len(keys[:room])
            if not room:
                yield part
                part, room = [], AT_ONCE
    if part:
        yield part


def _shortened(text: str) -> str:
    half = _CHARACTERS // 2
    return text if len(text) <= _CHARACTERS else f"{text[:half]} {text[-half:]}"
