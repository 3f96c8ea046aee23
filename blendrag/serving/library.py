"""A folder of texts whose KV is kept, and the prompts planned over them."""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blendrag.compress import check_budget
from blendrag.engine.client.running import RunningEngine
from blendrag.engine.wire.recipe import Recipe
from blendrag.errors import BlendragError, BlendragWarning, ConfigError
from blendrag.files.lock import IndexLock
from blendrag.models import load_tokenizer, model_window, resolve_model
from blendrag.options import BlendOptions
from blendrag.progress import Progress
from blendrag.prompt import Messages, PromptPlan, Recogniser, encode_document, plan_chat, plan_prompt
from blendrag.select import make_selector
from blendrag.serving.evidence import Evidence, PlannedPrompt
from blendrag.serving.forecaster import FORECASTS
from blendrag.serving.identity import codec_of, kv_identity, prefix_ids
from blendrag.serving.owners import document_of
from blendrag.serving.repeats import Repeats
from blendrag.serving.session import EngineSession, StartEngine
from blendrag.serving.sidecars import Sidecars
from blendrag.serving.texts import Texts
from blendrag.settings import Settings
from blendrag.store.catalogue import Catalogue
from blendrag.store.codec import CODECS
from blendrag.store.contexts import Chunk, Contexts

_log = logging.getLogger(__name__)

_MOST_REUSED = 10


class KnownTexts:
    """The known texts of a catalogue, whichever process changes it. Thread-safe."""

    def __init__(self, catalogue: Catalogue, tokenizer: Any) -> None:
        self._catalogue, self._tokenizer = catalogue, tokenizer
        self._recogniser: Recogniser | None = None
        self._number = 0  # of the last change that was read
        self._lock = threading.Lock()

    def now(self) -> Recogniser:
        """Return a recogniser of the present texts. The first call reads all, others what changed."""
        with self._lock:
            number, keys = self._catalogue.changes(self._number)
            if self._recogniser is None or keys is None:
                recogniser = Recogniser(self._tokenizer)
                _add(recogniser, self._catalogue.entries(), self._catalogue.an_owner_of())
                self._recogniser = recogniser
            elif keys:
                entries = self._catalogue.entries_of(keys)
                for key in set(keys).difference(entry.key for entry in entries):
                    self._recogniser.remove(key)
                _add(self._recogniser, entries, self._catalogue.an_owner_of(keys))
            self._number = number
            return self._recogniser


def _add(recogniser: Recogniser, entries: Iterable[Chunk], owners: Mapping[str, str]) -> None:
    for entry in entries:
        source = document_of(owners[entry.key]) if entry.key in owners else None
        recogniser.add(entry.key, entry.text, entry.token_ids, source)


class Library:
    """A library of texts, opened by its constructor, ended by :meth:`close`. The engine starts when needed.
    Thread-safe.

    Raises ModelNotFoundError, StoreMismatchError (the folder was made with another model or prefix) and
    StoreInUseError (another program has it open).
    """

    def __init__(
        self,
        root: Path,
        settings: Settings,
        engine: StartEngine | None = None,
        *,
        shared: bool = False,
        repeats_bytes: int = 0,
    ) -> None:
        """Open the folder. ``engine``: gives the engine when it is needed; None: the one that this process
        shares. ``shared``: with other processes of the same engine, whose worker has the folder locked
        instead. ``repeats_bytes``: of KV of texts that come again in prompts."""
        self.root, self.settings = root, settings
        # Whatever can be wrong with a model or a codec is said before a folder is made.
        CODECS[settings.new_codec]
        model_path = resolve_model(settings.model, settings.cache_dir, revision=settings.revision)
        self.tokenizer: Any = load_tokenizer(model_path)
        prefix = prefix_ids(settings, model_path)
        self.identity = kv_identity(settings, model_path, prefix, codec_of(settings, root))
        window = settings.max_model_len or model_window(model_path)
        self.contexts = Contexts(
            self.identity,
            encode_document(self.tokenizer, settings.separator),
            settings.context_tokens,
            window and window - len(prefix) - 1,
        )
        self._lock = None if shared else IndexLock(root)
        try:
            self.catalogue = Catalogue.open(root, self.identity)
        except BaseException:
            if self._lock:
                self._lock.release()
            raise
        self.session = EngineSession(root, settings, self.identity, prefix, engine, shared=shared)
        self.sidecars = Sidecars(root, settings, self.catalogue, self.session, shared=shared)
        of_texts = self.catalogue, self.contexts, self.tokenizer
        self.texts = Texts(*of_texts, self.session, self.sidecars, root if shared else None)
        most = min(settings.chunk_tokens, (window or settings.chunk_tokens) // 2)
        self.repeats = Repeats(self.texts, self.tokenizer, repeats_bytes, most) if repeats_bytes else None
        """The texts that come again in prompts, where they are kept."""
        self._known = KnownTexts(self.catalogue, self.tokenizer)
        self._warned = False

    def start(self, progress: Progress | None = None) -> RunningEngine:
        """Start the engine if it is not running, and return it."""
        return self.sidecars.start(progress)

    def close(self) -> None:
        """Finish background repairs, give the engine back, release the folder. Safe to call twice."""
        if self.repeats:
            self.repeats.close()
        self.sidecars.stop()
        self.session.close()
        self.catalogue.close()
        if self._lock:
            self._lock.release()

    def stats(self) -> dict[str, Any]:
        """Return chunks and bytes; what was counted per tier since the folder was made; eviction and its
        forecasts; the documents that were reused most; and what the tiers say now, when the engine runs."""
        counters = self.catalogue.counters()
        facts: dict[str, Any] = {
            "path": str(self.root),
            "model": self.identity.model,
            "chunks": asdict(self.catalogue.totals()),
            "counters": {name: counts for name, counts in counters.items() if name != FORECASTS},
            "eviction": self.eviction(),
            "reuse": [asdict(row) for row in self.catalogue.reuse(_MOST_REUSED)],
        }
        if store := self.session.store:
            facts |= asdict(store.stats())
        if self.sidecars.prefixes is not None:
            facts["tree"] = self.sidecars.prefixes.stats()
        return facts

    def eviction(self) -> dict[str, Any]:
        """Return facts about eviction. policies: by tier. forecasts: what was asked of the predictor since
        the folder was made, what became of it, and its processor time; reason: of the last failure in this
        process."""
        forecaster, counts = self.sidecars.forecaster, Counter(self.catalogue.counters().get(FORECASTS, {}))
        counts.update(forecaster.counted() if forecaster else {})
        return {
            "policies": {spec.label: spec.policy for spec in self.session.stack if spec.evicts},
            "forecasts": {
                **{name: counts[name] for name in ("asked", "answered", "dropped", "unanswered")},
                "busy_s": counts["busy_ms"] / 1e3,
                "reason": forecaster.counts.reason if forecaster else "",
            },
        }

    def prefetch(self, texts: Iterable[str]) -> None:
        """Begin to read the KV of texts that were found into memory, if the engine runs. Returns at once,
        whatever fails: who asks will be told.

        Warns, once, of texts whose KV is not kept: their vector store has not told of them, or the folder of
        the KV has been removed.
        """
        try:
            recogniser = self._known.now()
            known = [recogniser.known(stripped) for text in texts if (stripped := text.strip())]
            if None in known and not self._warned:
                self._warned = True
                warnings.warn(
                    f"{known.count(None)} of {len(known)} documents that were found have no KV in {self.root}"
                    " and are prefilled with every prompt: sync() of the vector store computes it",
                    BlendragWarning,
                    stacklevel=2,
                )
            keys = [text.key for text in known if text is not None]
            if keys and (store := self.session.store):
                self.session.later(store.prefetch(keys))
        except BlendragError:
            _log.debug("could not read KV ahead", exc_info=True)

    def order(self, texts: Iterable[str]) -> list[int]:
        """Return the places of texts, as they were ingested, in the order in which they go into a prompt
        (:meth:`Sidecars.order`)."""
        recogniser = self._known.now()
        known = [recogniser.known(text.strip()) for text in texts]
        return self.sidecars.order([(one.key or "") if one else "" for one in known])

    # -- prompts ------------------------------------------------------------------------------------------

    def plan(
        self, prompt: Messages | str, documents: Iterable[str] = (), /, **template_options: Any
    ) -> PromptPlan:
        """Plan a prompt of the caller's own, as messages or rendered: known texts are recognised in it by
        content, ``documents`` first."""
        known = self._known.now()
        if isinstance(prompt, str):
            return plan_prompt(prompt, self.tokenizer, known, hints=documents)
        messages = [dict(message) for message in prompt]
        return plan_chat(messages, self.tokenizer, known, documents, **template_options)

    def explain(self, plan: PromptPlan) -> list[dict[str, Any]]:
        """Return a row per segment, and per document not in the prompt: why, and tokens reused."""
        return plan.describe(self._unstored(plan))

    def _unstored(self, plan: PromptPlan) -> frozenset[str]:
        return frozenset(plan.cached_keys) - self.catalogue.ready(plan.cached_keys)

    def recipe(self, plan: PromptPlan, options: BlendOptions) -> tuple[Recipe | None, str | None]:
        """Return how a plan is blended with these options; or None, and why it is not. ConfigError for a
        wrong selector or budget, whatever the prompt holds: a typing error is no slow answer."""
        make_selector(options)
        if options.kv_budget is not None and self.settings.kv_budget is None:
            raise ConfigError("this engine evicts no KV: it has to be started with the setting kv_budget")
        check_budget(options)
        engine = self.start()
        check_budget(options, engine.facts.block_size)
        if not options.blend:
            return None, "blending is switched off"
        if (store := self.session.open()) is None:
            return None, f"this model is not blended: {engine.facts.reason}"
        ready = self.catalogue.ready(plan.cached_keys)
        recipe = Recipe(store.id, tuple(span for span in plan.spans if span[0] in ready), options)
        if not recipe.spans or recipe.cached < options.min_cached_tokens:
            least = options.min_cached_tokens
            return None, f"only {recipe.cached} cached tokens, fewer than min_cached_tokens = {least}"
        return recipe, None

    def prepare(self, plan: PromptPlan, options: BlendOptions, *, exact: bool = True) -> PlannedPrompt:
        """Return a plan with how it is prefilled. exact: it may begin with an exact prefix, which all prompts
        share. Raises as :meth:`recipe` does."""
        recipe, plain = self.recipe(plan, options)
        path, recipe = self.sidecars.path(plan, recipe) if exact else (None, recipe)
        return PlannedPrompt(plan, recipe, path, plain, options.kv_budget, self._unstored(plan))

    def answered(
        self,
        plan: PromptPlan,
        evidence: Evidence,
        prompt: Messages | str,
        conversation: str | None,
        seconds: float,
        *,
        apart: bool = False,
        marked: Sequence[str] = (),
    ) -> int:
        """Do what is left to do behind an answer, which is given whatever becomes of that: repair what was
        missing, learn the forms that texts have in the prompt, keep what earlier prompts held, too, and have
        the forecaster note the prompt (:meth:`Forecaster.answered`). Returns the tokens repaired.

        apart: others of the namespace shall not know of the prompt, so nothing of it is kept. marked: texts
        of it that the client has said to be documents.
        """
        stored = 0
        with contextlib.suppress(BlendragError):
            stored = self.texts.repair(evidence.missing) if evidence.missing else 0
            # An answer does not wait for others' documents: the next prompt has the same forms.
            if plan.forms and not apart and self.texts.changing.free:
                self.texts.learn(plan.forms)
        if self.repeats and self.session.store and not apart:
            own = evidence.mode in ("blended", "mixed") or not self.settings.prefix_caching
            known = self._known.now()
            unknown = [text for text in marked if known.known(text) is None]
            self.repeats.answered(plan, evidence.prefix if own else None, unknown)
        if self.sidecars.forecaster:
            self.sidecars.forecaster.answered(prompt, plan, conversation, seconds)
        return stored
