"""Which conversations go on: asked beside the engine, and told to the eviction policies of its store."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from blendrag.embedder import Embedder
from blendrag.errors import BlendragError
from blendrag.eviction import POLICIES
from blendrag.eviction.hazard_file import NAME as HAZARD
from blendrag.forecast.background import BackgroundPredictor, ForecastCounts
from blendrag.forecast.classifier import MANIFEST, load_manifest
from blendrag.forecast.conversation import PROMPTS, Window, conversation_id, window_of, without_documents
from blendrag.forecast.features import Features
from blendrag.forecast.folder import default_folder
from blendrag.forecast.outcome_log import OutcomeLog
from blendrag.forecast.predictor import Predictor
from blendrag.forecast.trace_log import TraceLog
from blendrag.forecast.words import open_embedder
from blendrag.prompt import Messages, PromptPlan
from blendrag.serving.session import EngineSession
from blendrag.settings import Settings
from blendrag.store.stack import TierSpec
from blendrag.store.tiers.local import Forecast

FORECASTS = "forecasts"  # their counters' name, beside those of tiers
CONVERSATIONS = 4096  # whose chunks are remembered: the latest
CHUNKS = 256  # of each: the latest
AT_ONCE = 32  # keys in one call to the worker, which takes up to 10 us for each key and tier
_CHARACTERS = 2048  # that are kept of an earlier prompt: more than the predictor reads of it

_log = logging.getLogger(__name__)


def wants_forecasts(stack: Iterable[TierSpec]) -> bool:
    """Whether a tier of this machine evicts by a policy that goes by forecasts."""
    return any(spec.evicts and POLICIES[spec.policy].uses_forecasts() for spec in stack)


@dataclass(slots=True)
class _Conversation:
    """chunks: keys, the latest used last. prompts: the latest, where the caller does not keep them."""

    chunks: dict[str, None] = field(default_factory=dict)
    prompts: tuple[str, ...] = ()
    turns: int = 0


class Forecaster:
    """Made with the engine, ended by :meth:`close`. Thread-safe.

    Without a trained predictor, or with one that does not work, nothing is told, and the policies are LRU.
    What goes wrong is warned of once, and counted. traffic: where prompts are logged, if they may be; closed
    with the rest.
    """

    def __init__(self, session: EngineSession, settings: Settings, traffic: TraceLog | None = None) -> None:
        self._session, self._settings, self._traffic = session, settings, traffic
        self._folder = default_folder(settings)
        self._conversations: OrderedDict[str, _Conversation] = OrderedDict()
        self._lock = threading.Lock()
        self._predictor = BackgroundPredictor(
            self._load,
            self._tell,
            version=lambda: _version(self._folder),
            log=self._open_log if settings.outcome_log else None,
        )

    def answered(
        self,
        prompt: Messages | str,
        plan: PromptPlan,
        conversation: str | None,
        tokens: int = 0,
        seconds: float = 0.0,
    ) -> None:
        """A prompt was answered: log it, and ask whether its conversation goes on. Returns at once.

        tokens: of the answer. seconds: since the prompt came.
        """
        whose, said = self._read(prompt, plan, conversation)
        if self._traffic:
            chunks = [(key, len(part.token_ids)) for part in plan.segments if (key := part.chunk_key)]
            length = plan.cached_tokens + plan.fresh_tokens
            self._traffic.note(chunks, length, tokens, whose, seconds)
        if whose is not None:
            self.ask(whose, plan.cached_keys, said)

    def name(self, prompt: Messages | str, plan: PromptPlan, conversation: str | None) -> str | None:
        """The conversation's id for vLLM's prefix cache, where that goes by forecasts."""
        if not self._settings.prefix_forecasts:
            return None
        return self._read(prompt, plan, conversation)[0]

    def ask(self, conversation: str, chunks: Iterable[str], said: Window | str) -> None:
        """A prompt of the conversation, with these chunks in this order, was answered. Returns at once.

        said: the user's prompts so far; or the last one, where those before were given here as well.
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
            if isinstance(said, str):
                one.turns += 1
                window = Window((*one.prompts, said), one.turns)
                one.prompts = (*one.prompts, _shortened(said))[1 - PROMPTS :]
            else:
                window = said
        self._predictor.ask(conversation, window)

    @property
    def counts(self) -> ForecastCounts:
        return self._predictor.counts

    def counted(self) -> dict[str, int]:
        """The counts as the catalogue keeps them."""
        counts = self._predictor.counts
        whole = {name: getattr(counts, name) for name in ("asked", "answered", "dropped", "unanswered")}
        return {**whole, "busy_ms": round(1e3 * counts.busy_s)}

    def close(self) -> None:
        """End the predictor; what it was not asked in time stays unanswered."""
        self._predictor.close()
        if self._traffic:
            self._traffic.close()

    # -- in the predictor's thread ------------------------------------------------------------------------

    def _load(self) -> Predictor:
        self._teach()
        if (self._folder / MANIFEST).exists() or not self._settings.outcome_log:
            predictor = Predictor.load(self._folder, _embedder(load_manifest(self._folder).embedder))
        else:  # so that there is something to train on
            predictor = Predictor(Features(_embedder(self._settings.embedder)), None)
        predictor.features.rows([Window.of(["Hello"])])  # loads the embedder
        return predictor

    def _teach(self) -> None:
        """Have ``lpc+`` go by the latest model, in this store, now or when it is chosen."""
        if (store := self._session.store) is None:
            return
        try:
            store.learn(self._folder)
        except BlendragError as error:
            if any(spec.evicts and POLICIES[spec.policy].learns() for spec in self._session.stack):
                _log.warning("lpc+ goes by LRU: %s", error)

    def _read(
        self, prompt: Messages | str, plan: PromptPlan, conversation: str | None
    ) -> tuple[str | None, Window | str]:
        """Whose prompt it is, and what the user said.

        conversation: the caller's id of it; else it is the one that messages open. A text alone belongs to
        none; of its prompt, what stands behind the last document counts as the user's.
        """
        documents, namespace = [segment.text for segment in plan.cached_segments], self._settings.namespace
        if isinstance(prompt, str):
            said = prompt.rpartition(documents[-1])[2] if documents else prompt
            return conversation_id((), conversation, namespace), said
        messages = without_documents(prompt, documents)
        return conversation_id(messages, conversation, namespace), window_of(messages)

    def _open_log(self, predictor: Predictor) -> OutcomeLog:
        return OutcomeLog(self._folder, predictor.features.embedder.name)

    def _tell(self, chances: Mapping[str, float]) -> None:
        store, to_prefixes = self._session.store, self._settings.prefix_forecasts
        if store is None or not (to_prefixes or wants_forecasts(self._session.stack)):
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
    """The same forecasts, with at most ``AT_ONCE`` keys in each part."""
    part: list[Forecast] = []
    room = AT_ONCE
    for conversation, chance, keys in forecasts:
        while True:  # once at least: of a conversation without chunks, vLLM's prefix cache holds something
            part.append((conversation, chance, keys[:room]))
            keys, room = keys[room:], room - len(keys[:room])
            if not room:
                yield part
                part, room = [], AT_ONCE
            if not keys:
                break
    if part:
        yield part


def _embedder(name: str) -> Embedder:
    """One of its own, as embedders are not for several threads; an accelerator is the engine's alone."""
    return open_embedder(name, device="cpu")


def _version(folder: Path) -> list[int]:
    """What changes when another predictor, or another model of ``lpc+``, is put into ``folder``."""
    found = []
    for name in (MANIFEST, HAZARD):
        with suppress(OSError):
            stat = (folder / name).stat()
            found += [stat.st_mtime_ns, stat.st_ino]
    return found


def _shortened(text: str) -> str:
    half = _CHARACTERS // 2
    return text if len(text) <= _CHARACTERS else f"{text[:half]} {text[-half:]}"
