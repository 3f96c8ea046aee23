"""A folder of texts whose KV is kept, and the prompts planned over them."""

from __future__ import annotations

import contextlib
import shutil
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blendrag.compress import check_budget
from blendrag.engine.client.running import RunningEngine
from blendrag.engine.prefixes import PrefixPath
from blendrag.engine.recipe import Recipe
from blendrag.errors import BlendragError, BlendragWarning, ConfigError, EngineClosedError, StoreError
from blendrag.models import load_tokenizer, model_window, resolve_model
from blendrag.options import BlendOptions
from blendrag.progress import Progress
from blendrag.prompt import Messages, PromptPlan, encode_document, plan_chat, plan_prompt
from blendrag.select import make_selector
from blendrag.serving.forecaster import FORECASTS, Forecaster, wants_forecasts
from blendrag.serving.identity import kv_identity, prefix_ids
from blendrag.serving.known_texts import KnownTexts
from blendrag.serving.planned import PlannedPrompt
from blendrag.serving.prefill import INGEST_BATCH_TOKENS, PrefillReport, batches, prefill_pending
from blendrag.serving.prefixes import Prefixes, tree_folder
from blendrag.serving.session import EngineSession, StartEngine
from blendrag.settings import Settings
from blendrag.store.catalogue import Catalogue
from blendrag.store.codec import CODECS
from blendrag.store.contexts import Chunk, Contexts
from blendrag.store.lock import IndexLock, Turns

_MOST_REUSED = 10


@dataclass(slots=True)
class _Document:
    """A source, as known while its texts are registered. made: keys by text. last: the chunks of the last
    owner."""

    made: dict[str, str] = field(default_factory=dict)
    last: list[Chunk] = field(default_factory=list)


class Library:
    """A library of texts, opened by its constructor, ended by :meth:`close`. The engine starts when needed.
    Thread-safe.

    A text belongs to owners (documents). It is kept as long as it has one, and once however many it has.
    Raises ModelNotFoundError, StoreMismatchError (the folder was made with another model or prefix) and
    StoreInUseError (another program has it open).
    """

    def __init__(
        self, root: Path, settings: Settings, engine: StartEngine | None = None, *, shared: bool = False
    ) -> None:
        """Open the folder. ``engine``: gives the engine when it is needed; None: the one that this process
        shares. ``shared``: with other processes of the same engine, whose worker has the folder locked
        instead."""
        self.root, self.settings = root, settings
        # Whatever can be wrong with a model or a codec is said before a folder is made.
        CODECS[settings.codec]
        model_path = resolve_model(settings.model, settings.cache_dir, revision=settings.revision)
        self.tokenizer: Any = load_tokenizer(model_path)
        self._prefix = prefix_ids(settings, model_path)
        self.identity = kv_identity(settings, model_path, self._prefix)
        window = settings.max_model_len or model_window(model_path)
        self.contexts = Contexts(
            self.identity,
            encode_document(self.tokenizer, settings.separator),
            settings.context_tokens,
            window and window - len(self._prefix) - 1,
        )
        self._lock = None if shared else IndexLock(root)
        try:
            self.catalogue = Catalogue.open(root, self.identity)
        except BaseException:
            if self._lock:
                self._lock.release()
            raise
        self.session = EngineSession(root, settings, self.identity, self._prefix, engine, shared=shared)
        self._known = KnownTexts(self.catalogue, self.tokenizer)
        self._prefilling = Turns(root / "lock.prefilling" if shared else None)
        self._changing = Turns(root / "lock.changing" if shared else None)
        self._beside = threading.Lock()
        self.forecaster: Forecaster | None = None
        """The forecaster beside the engine, while the policy of a tier goes by forecasts, or their outcomes
        are logged."""
        self.prefixes: Prefixes | None = None
        """Exact prefixes, while an engine runs, where they are switched on and this process has it to
        itself."""
        self._has_tree = bool(settings.tree)
        if self._lock and not settings.tree_stays:  # else another process may have it open
            shutil.rmtree(tree_folder(root), ignore_errors=True)
        self._warned = self._tree_warned = self._closed = self._no_ingest = False

    def start(self, progress: Progress | None = None) -> RunningEngine:
        """Start the engine if it is not running, and return it."""
        engine = self.session.start(progress)
        self._forecast()
        self._open_prefixes(engine)
        return engine

    def _open_prefixes(self, engine: RunningEngine) -> None:
        if not self._has_tree or (self.prefixes is not None and self.prefixes.client.engine is engine):
            return
        with self._beside:
            if not self._closed and (self.prefixes is None or self.prefixes.client.engine is not engine):
                self._close_prefixes()
                try:
                    self.prefixes = Prefixes.open(self.root, self.settings, self.catalogue, engine)
                except StoreError as error:
                    self._without_tree(error)
                else:
                    if self.prefixes is None:
                        self._without_tree(
                            engine.facts.reason or "several devices, engines or API servers keep none yet"
                        )
                self._has_tree = self.prefixes is not None

    def _without_tree(self, reason: object) -> None:
        """Answer prompts without a tree from now on. Warns once."""
        if not self._tree_warned:
            self._tree_warned = True
            warnings.warn(
                f"no exact prefixes, whatever tree_bytes the tiers have: {reason}",
                BlendragWarning,
                stacklevel=2,
            )

    def _close_prefixes(self) -> None:
        if self.prefixes is not None:
            self.prefixes.close()
            self.prefixes = None

    def _forecast(self) -> None:
        """Have a forecaster beside the engine, if anybody has use for it."""
        wanted = self.settings.outcome_log or wants_forecasts(self.session.stack)
        with self._beside:
            if wanted and not self._closed and self.forecaster is None and self.session.store is not None:
                self.forecaster = Forecaster(self.session, self.settings, self.root)

    def stop_ingest(self) -> None:
        """Have :meth:`prefill` end behind the texts at hand, now and later. Returns at once."""
        self._no_ingest = True

    def _check_ingest(self) -> None:
        if self._no_ingest:
            raise EngineClosedError("the engine is about to end: texts without KV are prefilled by the next")

    def stop_beside(self) -> None:
        """End what is done beside prompts, for good: growing, and forecasts, whose notes are written."""
        with self._beside:
            self._closed = True
            self._close_prefixes()
            if self.forecaster is not None:
                self.forecaster.close()
                with contextlib.suppress(StoreError):
                    self.catalogue.count(FORECASTS, self.forecaster.counted())
                self.forecaster = None

    def close(self) -> None:
        """Finish background repairs, give the engine back, release the folder. Safe to call twice."""
        self.stop_beside()
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
        if self.prefixes is not None:
            facts["tree"] = self.prefixes.stats()
        return facts

    def eviction(self) -> dict[str, Any]:
        """Return facts about eviction. policies: by tier. forecasts: what was asked of the predictor since
        the folder was made, what became of it, and its processor time; reason: of the last failure in this
        process."""
        forecaster, counts = self.forecaster, Counter(self.catalogue.counters().get(FORECASTS, {}))
        counts.update(forecaster.counted() if forecaster else {})
        return {
            "policies": {spec.label: spec.policy for spec in self.session.stack if spec.evicts},
            "forecasts": {
                **{name: counts[name] for name in ("asked", "answered", "dropped", "unanswered")},
                "busy_s": counts["busy_ms"] / 1e3,
                "reason": forecaster.counts.reason if forecaster else "",
            },
        }

    # -- texts --------------------------------------------------------------------------------------------

    def changing(self) -> AbstractContextManager[None]:
        """Make several changes, of which none of another thread's or process's comes in between."""
        return self._changing.mine()

    def register(
        self, documents: Mapping[str, Iterable[str]], sources: Mapping[str, str] | None = None
    ) -> set[str]:
        """Make these the texts of their owners, in place of those they had. :meth:`prefill` does the rest.
        Returns the owners that had others, or none; the others keep their chunks as they are.

        sources: the document that an owner's texts are a part of. New texts of a source are prefilled behind
        those of the owner that precedes theirs here. Several texts of an owner are forms of one (with
        metadata and without): each stands behind the same form. Blanks around a text are not part of it:
        prompts often strip them.
        """
        sources = sources or {}
        wanted = {
            owner: [text for text in dict.fromkeys(text.strip() for text in texts) if text]
            for owner, texts in documents.items()
        }
        with self._changing.mine():
            new = {owner for owner, texts in wanted.items() if self.catalogue.texts_of(owner) != set(texts)}
            orphans = self._take(self._without(new))
            so_far: dict[str, _Document] = {}  # by source
            for owner, texts in wanted.items():
                source = sources.get(owner)
                document = so_far.setdefault(source, _Document()) if source else _Document()
                held = [] if owner in new else self.catalogue.chunks_of(owner)
                orphans += self._take({owner: self._chunks(texts, document, held)})
        self.drop(orphans)
        return new

    def release(self, owners: Iterable[str]) -> None:
        """Forget owners, and the KV of the texts that nobody else owns. An unknown owner is no error.

        What was prefilled behind these texts is prefilled anew: beside prompts, if the engine runs.
        """
        owners = list(owners)
        with self._changing.mine():
            moved = self._without(owners)
            orphans = self._take(moved)
            orphans += [key for owner in owners for key in self.catalogue.release(owner)]
        self.drop(orphans)
        self.repair(chunk.key for chunks in moved.values() for chunk in chunks)

    def _chunks(self, texts: Iterable[str], document: _Document, held: Iterable[Chunk]) -> list[Chunk]:
        """Return the next chunks of a document. held: those that stay; a text that comes again is the chunk
        it was."""
        before, chunks = document.last, list[Chunk]()
        known = {chunk.text: chunk for chunk in held}
        for text in texts:
            if text not in known and text in document.made:
                known[text] = self.catalogue.entries_of([document.made[text]])[0]
            elif text not in known:
                if not (ids := encode_document(self.tokenizer, text)):
                    continue
                same_form = before[min(len(chunks), len(before) - 1)] if before else None
                known[text] = self.contexts.chunk(text, ids, same_form)
            chunks.append(known[text])
        document.made |= {chunk.text: chunk.key for chunk in chunks}
        document.last = chunks or before
        return chunks

    def _without(self, owners: Iterable[str]) -> dict[str, list[Chunk]]:
        """Return the chunks of other owners whose KV has traces of what only these own, as they are to be
        when these have left."""
        leaving = set(owners)
        going = set(self.catalogue.only_of(*leaving))
        renewed: dict[str, Chunk] = {}
        for entry in self.catalogue.behind(going):
            if entry.key not in going:
                before = renewed.get(entry.after)
                renewed[entry.key] = self.contexts.chunk(entry.text, entry.token_ids, before)
        return {
            owner: [renewed.get(chunk.key, chunk) for chunk in self.catalogue.chunks_of(owner)]
            for owner in self.catalogue.owners_of(renewed)
            if owner not in leaving
        }

    def _take(self, owned: Mapping[str, Sequence[Chunk]]) -> list[str]:
        """Register chunks by owner. Returns keys whose KV can go."""
        orphans: list[str] = []
        for owner, chunks in owned.items():
            orphans += self.catalogue.register(owner, chunks)
        return orphans

    def drop(self, keys: Iterable[str]) -> None:
        """Delete the KV of chunks that have left the catalogue."""
        with self._changing.mine():
            keys = set(keys)
            keys = sorted(keys - self.catalogue.known(keys))  # what one owner dropped, another may have taken
            if not keys:
                return
            if store := self.session.store:  # else swept when the store is next opened
                store.delete(keys)
            with self._beside:  # none is opened meanwhile
                prefixes = self.prefixes if self.prefixes is not None and self.prefixes.alive else None
                if prefixes is None:
                    shutil.rmtree(tree_folder(self.root), ignore_errors=True)  # it can grow again
            if prefixes is not None:
                prefixes.forget(keys)

    def prefill(self, report: PrefillReport, progress: Progress) -> None:
        """Compute and store the KV of all texts that have none. Raises StoreFullError, EngineError."""
        with self._prefilling.mine():  # a second caller waits, and finds nothing left to do
            self._check_ingest()
            self.session.settle()  # nor is done again what is repaired beside prompts
            pending = self.catalogue.pending()
            if not pending:
                return
            engine = self.start(progress)
            report.not_blended = engine.facts.reason
            if (store := self.session.open(progress)) is None:
                return
            before, window = len(self._prefix), engine.max_model_len
            fitting = [one for one in pending if before + len(one.context) + len(one.token_ids) < window]
            report.too_long += len(pending) - len(fitting)
            if fitting:
                batch = INGEST_BATCH_TOKENS
                prefill_pending(fitting, store, batch, report, progress, self._check_ingest)

    def prefetch(self, texts: Iterable[str]) -> None:
        """Begin to read the KV of texts that were found into memory, if the engine runs. Returns at once.

        Warns, once, of texts whose KV is not kept: their vector store has not told of them, or the folder of
        the KV has been removed.
        """
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

    def order(self, keys: Sequence[str]) -> list[int]:
        """Return the places of documents (chunk keys, "" for unknown ones), in the order in which they go
        into a prompt: as they came, unless the setting ``order`` says otherwise and there is a tree."""
        prefixes = self.prefixes
        if self.settings.documents_first and prefixes is not None and prefixes.alive:
            with contextlib.suppress(StoreError):  # the prompt is answered in any order
                return prefixes.tree.order(keys)
        return list(range(len(keys)))

    def order_texts(self, texts: Iterable[str]) -> list[int]:
        """Do as :meth:`order` for texts as they were ingested."""
        recogniser = self._known.now()
        known = [recogniser.known(text.strip()) for text in texts]
        return self.order([(one.key or "") if one else "" for one in known])

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
        """Return a row per segment, and per document that is not in the prompt: found or not, why, tokens
        reused."""
        ready = self.catalogue.ready(plan.cached_keys)
        rows = plan.describe()
        for row in rows:
            if row["kind"] == "cached" and row["chunk_key"] not in ready:
                row.update(kind="fresh", reused=0, reason="its KV is not stored (any more): ingest again")
        return rows

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

    def path(self, plan: PromptPlan, recipe: Recipe | None) -> tuple[PrefixPath | None, Recipe | None]:
        """Return a plan's way through the tree of exact prefixes, if it is not blended or all of its
        documents are there; else how it is blended, behind those that are (:meth:`Prefixes.path`)."""
        if self.prefixes is None or not self.prefixes.alive:
            return None, recipe
        try:
            return self.prefixes.path(plan, recipe)
        except StoreError as error:  # a full disk, perhaps
            self.prefixes.failed += 1
            self._without_tree(error)
            return None, recipe

    def prepare(self, plan: PromptPlan, options: BlendOptions, *, exact: bool = True) -> PlannedPrompt:
        """Return a plan with how it is prefilled. exact: it may begin with an exact prefix, which all prompts
        share. Raises as :meth:`recipe` does."""
        recipe, plain = self.recipe(plan, options)
        path, recipe = self.path(plan, recipe) if exact else (None, recipe)
        return PlannedPrompt(plan, recipe, path, plain, options.kv_budget)

    def answered(
        self,
        plan: PromptPlan,
        missing: Iterable[str],
        prompt: Messages | str,
        conversation: str | None,
        seconds: float,
    ) -> int:
        """Do what is left to do behind an answer, which is given whatever becomes of that: repair what was
        missing, and have the forecaster note the prompt (:meth:`Forecaster.answered`). Returns the tokens
        repaired."""
        stored = 0
        with contextlib.suppress(BlendragError):
            stored = self.repair(missing) if missing else 0
        if self.forecaster:
            self.forecaster.answered(prompt, plan, conversation, seconds)
        return stored

    def repair(self, missing: Iterable[str]) -> int:
        """Prefill chunks again whose KV was found missing or damaged, or has to be another, beside prompts.

        Returns their tokens, without those of chunks that still have to be looked for.
        """
        found, store = self.catalogue.entries_of(list(missing)), self.session.store
        entries = [entry for entry in found if entry.state == "pending"]
        ready = [entry for entry in found if entry.state == "ready"]
        if store:
            most = INGEST_BATCH_TOKENS
            for batch in batches(entries, most):
                self.session.later(store.ingest_later(batch))
            for batch in batches(ready, most):
                self.session.later(store.check_later(batch))
        return sum(len(entry.token_ids) for entry in entries)
