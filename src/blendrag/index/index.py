"""``BlendIndex``: a folder of documents that answers questions. What a user without a framework calls."""

from __future__ import annotations

import contextlib
import difflib
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from blendrag.engine.handle import Delta, Engine, Sampling
from blendrag.engine.recipe import Recipe, spans_of
from blendrag.errors import BlendragError, EmptyIndexError, PromptTooLongError, StoreError
from blendrag.index.answer import Answer, Evidence, Source, evidence_of
from blendrag.index.embed import Embedder
from blendrag.index.identity import kv_identity
from blendrag.index.ingest import DocumentPipeline, IngestReport, prefill_pending
from blendrag.index.ledger import Ledger
from blendrag.index.loaders import Item
from blendrag.index.progress import IngestProgress, ingest_progress
from blendrag.index.split import Splitter
from blendrag.index.vectors import Hit, VectorStore
from blendrag.models import resolve_embedder, resolve_model
from blendrag.prompt import DocumentNote, KnownText, PromptPlan, assemble
from blendrag.settings import Settings
from blendrag.store.catalogue import Catalogue, Entry
from blendrag.store.lock import IndexLock

# The window must leave room for an answer worth reading.
_LEAST_ANSWER_TOKENS = 32


class AnswerStream:
    """Pieces of an answer's text as they are generated; afterwards ``answer`` holds the whole."""

    def __init__(self, pieces: Iterator[str | Answer]) -> None:
        self._pieces = pieces
        self.answer: Answer | None = None

    def __iter__(self) -> Iterator[str]:
        for piece in self._pieces:
            if isinstance(piece, Answer):
                self.answer = piece
            else:
                yield piece

    def close(self) -> None:
        """Stop generating."""
        close = getattr(self._pieces, "close", None)
        if close:
            close()


class BlendIndex:
    """Open with :meth:`open`, close with :meth:`close` or ``with``. The engine starts when needed."""

    def __init__(self, root: Path, settings: Settings) -> None:
        from transformers import AutoTokenizer

        self.root, self.settings = root, settings
        self._lock = IndexLock(root)
        self._engine: Engine | None = None
        self._engine_lock = threading.Lock()
        self._repairs: list[Future[Any]] = []
        self._store_id = ""
        try:
            model_path = resolve_model(settings.model, settings.cache_dir, revision=settings.revision)
            self._identity = kv_identity(settings, model_path)
            self._catalogue = Catalogue.open(root, self._identity)
            embedder = Embedder(resolve_embedder(settings.embedder), name=settings.embedder)
            self._vectors = VectorStore(root, embedder)
            self._ledger = Ledger(root)
            self.tokenizer: Any = AutoTokenizer.from_pretrained(str(model_path))
        except BaseException:
            self._lock.release()
            raise

    @classmethod
    def open(
        cls, path: str | Path, model: str | None = None, *, create: bool = True, **options: Any
    ) -> BlendIndex:
        """Open the index in folder ``path``; ``options`` are any of the settings.

        Raises ConfigError, ModelNotFoundError, StoreMismatchError (made with another model), StoreInUseError
        (open in another process), and StoreError if it does not exist and ``create`` is False.
        """
        settings = Settings.load(model=model, **options)
        root = Path(path).expanduser().resolve()
        if not create and not (root / "catalogue.sqlite").is_file():
            raise StoreError(f"no index at {str(path)!r}{_did_you_mean(root)}: ingest something first")
        return cls(root, settings)

    def __enter__(self) -> BlendIndex:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish background repairs, give the engine back, release the folder. Safe to call twice."""
        for repair in self._repairs:
            with contextlib.suppress(Exception):
                repair.result()
        if self._engine is not None:
            with contextlib.suppress(BlendragError):
                if self._store_id:
                    self._engine.call("close_store", self._store_id)
            self._engine.release()
            self._engine = None
        self._catalogue.close()
        self._ledger.close()
        self._lock.release()

    # -- the engine ---------------------------------------------------------------------------------------

    def start(self, progress: IngestProgress | None = None) -> Engine:
        """The engine, started if it is not running: half a minute that the first question need not pay."""
        with self._engine_lock:
            if self._engine is None:
                engine = Engine.shared(self.settings, (progress or IngestProgress()).note)
                try:
                    if engine.blends:
                        self._store_id = engine.call(
                            "open_store",
                            str(self.root),
                            asdict(self._identity),
                            self.settings.ram_bytes,
                            self.settings.disk_bytes,
                        )
                except BaseException:
                    engine.release()
                    raise
                self._engine = engine
            return self._engine

    def _call(self, method: str, *args: Any) -> Any:
        return self.start().call(method, self._store_id, *args)

    # -- documents ----------------------------------------------------------------------------------------

    def ingest(self, items: Item | Iterable[Item], *, progress: bool | None = None) -> IngestReport:
        """Make the index hold ``items``: paths, folders, texts, or documents.

        Unchanged documents are skipped, changed ones replaced, files deleted from a given folder removed.
        May be interrupted and repeated. ``progress``: show a bar; None: if someone is watching.
        Raises SourceError for a wrong path, StoreFullError when the disk is full.
        """
        begin = time.perf_counter()
        report = IngestReport()
        with ingest_progress(progress) as bar:
            orphans = self._pipeline().take(items, report, bar)
            self._delete_kv(orphans)
            pending = self._catalogue.pending()
            if pending:
                engine = self.start(bar)
                report.not_blended = engine.facts["reason"]
                if engine.blends:
                    prefill_pending(pending, self._call, self.settings.ingest_batch_tokens, report, bar)
        report.total_s = time.perf_counter() - begin
        return report

    def delete(self, source: str) -> None:
        """Take a document out of the index. Raises EmptyIndexError if it is not in it."""
        if source not in self._ledger.sources():
            raise EmptyIndexError(f"no document {source!r} in this index")
        self._delete_kv(self._pipeline().remove(source))

    def _pipeline(self) -> DocumentPipeline:
        s = self.settings
        return DocumentPipeline(
            self.root,
            self._identity,
            f"chunk_tokens={s.chunk_tokens} chunk_overlap={s.chunk_overlap}",
            Splitter(self.tokenizer, chunk_tokens=s.chunk_tokens, overlap=s.chunk_overlap),
            self._ledger,
            self._catalogue,
            self._vectors,
        )

    def _delete_kv(self, keys: Sequence[str]) -> None:
        if keys and self._engine is not None and self._store_id:  # else swept when the store is next opened
            self._call("delete", list(keys))

    # -- questions ----------------------------------------------------------------------------------------

    def retrieve(self, question: str, top_k: int | None = None) -> list[Hit]:
        """The chunks most like the question, best first. Raises EmptyIndexError without any documents."""
        hits = self._vectors.search(question, top_k or self.settings.top_k)
        if not hits:
            raise EmptyIndexError(f"the index {str(self.root)!r} holds no documents: ingest some first")
        return hits

    def plan(
        self, question: str, *, top_k: int | None = None, history: Sequence[Mapping[str, str]] = ()
    ) -> tuple[PromptPlan, list[Hit]]:
        """The prompt for a question, and the chunks in it. Chunks that do not fit the window are left out."""
        hits = self.retrieve(question, top_k)
        ids = {entry.key: entry for entry in self._catalogue.entries_of([hit.key for hit in hits])}
        left_out: list[DocumentNote] = []
        while True:
            known = [_known_text(hit, ids[hit.key]) for hit in hits if hit.key in ids]
            plan = assemble(
                self.tokenizer,
                system_prompt=self.settings.system_prompt,
                documents=known,
                separator=self.settings.separator,
                question=question,
                history=[dict(message) for message in history],
            )
            if len(plan.token_ids) + _LEAST_ANSWER_TOKENS <= self._window() or not hits:
                break
            dropped = hits.pop()
            tokens = len(ids[dropped.key].token_ids) if dropped.key in ids else 0
            left_out.append(DocumentNote(dropped.source, False, "no room in the window", tokens, 0))
        if not hits:
            raise PromptTooLongError(
                f"the question leaves no room for a document in the model's window of {self._window()} tokens"
            )
        return replace(plan, notes=(*plan.notes, *left_out)), hits

    def explain(self, question: str, **options: Any) -> list[dict[str, Any]]:
        """The plan of a question, a row per segment: cached or fresh, tokens, for documents the reason."""
        plan, _ = self.plan(question, **options)
        ready = self._catalogue.ready(plan.cached_keys)
        rows = plan.describe()
        for row in rows:
            if row["kind"] == "cached" and row["chunk_key"] not in ready:
                row.update(kind="fresh", reused=0, reason="its KV is not stored (yet): ingest again")
        return rows

    def ask(
        self,
        question: str,
        *,
        top_k: int | None = None,
        history: Sequence[Mapping[str, str]] = (),
        blend: bool | None = None,
        **sampling: Any,
    ) -> Answer:
        """Answer a question from the index. ``sampling``: fields of :class:`Sampling`.

        ``blend=False`` prefills the same prompt plainly, for comparison.
        """
        stream = self.stream(question, top_k=top_k, history=history, blend=blend, **sampling)
        for _ in stream:
            pass
        assert stream.answer is not None, "a stream that ended without an error has its answer"
        return stream.answer

    def stream(
        self,
        question: str,
        *,
        top_k: int | None = None,
        history: Sequence[Mapping[str, str]] = (),
        blend: bool | None = None,
        **sampling: Any,
    ) -> AnswerStream:
        """``ask``, piece by piece. Closing the stream stops the generation."""
        return AnswerStream(self._stream(question, top_k, history, blend, sampling))

    def _stream(
        self,
        question: str,
        top_k: int | None,
        history: Sequence[Mapping[str, str]],
        blend: bool | None,
        sampling: dict[str, Any],
    ) -> Iterator[str | Answer]:
        engine = self.start()
        request = _Request(self, engine, question, top_k, history, blend)
        pieces = engine.stream(request.plan.token_ids, self._sampling(sampling), request.recipe)
        with contextlib.closing(pieces):  # type: ignore[type-var]
            for delta in pieces:
                request.add(delta)
                yield delta.text
        yield request.answer()

    async def aask(
        self,
        question: str,
        *,
        top_k: int | None = None,
        history: Sequence[Mapping[str, str]] = (),
        blend: bool | None = None,
        **sampling: Any,
    ) -> Answer:
        """``ask`` for an event loop, which is not blocked. Cancelling it stops the generation."""
        answer: Answer | None = None
        async for piece in self.astream(question, top_k=top_k, history=history, blend=blend, **sampling):
            answer = piece if isinstance(piece, Answer) else answer
        assert answer is not None, "a stream that ended without an error has its answer"
        return answer

    async def astream(
        self,
        question: str,
        *,
        top_k: int | None = None,
        history: Sequence[Mapping[str, str]] = (),
        blend: bool | None = None,
        **sampling: Any,
    ) -> AsyncIterator[str | Answer]:
        """Pieces of text, and at the end the :class:`Answer`."""
        import asyncio

        engine = await asyncio.to_thread(self.start)
        request = await asyncio.to_thread(_Request, self, engine, question, top_k, history, blend)
        pieces = engine.astream(request.plan.token_ids, self._sampling(sampling), request.recipe)
        async with contextlib.aclosing(pieces):  # type: ignore[type-var]
            async for delta in pieces:
                request.add(delta)
                yield delta.text
        yield request.answer()

    def _sampling(self, given: dict[str, Any]) -> Sampling:
        defaults = {"max_tokens": self.settings.max_tokens, "temperature": self.settings.temperature}
        return Sampling(**{**defaults, **{name: value for name, value in given.items() if value is not None}})

    def recipe(self, plan: PromptPlan, blend: bool | None = None) -> tuple[Recipe | None, str | None]:
        """How a plan is blended, or None and why it is not."""
        s, engine = self.settings, self.start()
        if not (s.blend if blend is None else blend):
            return None, "blending is switched off"
        if not engine.blends:
            return None, f"this model is not blended: {engine.facts['reason']}"
        ready = self._catalogue.ready(plan.cached_keys)
        spans = spans_of([span for span in plan.transfer_params() if span[0] in ready])
        cached = sum(length for _, _, length in spans)
        if not spans or cached < s.min_cached_tokens:
            return None, f"only {cached} cached tokens, fewer than min_cached_tokens = {s.min_cached_tokens}"
        return (
            Recipe(
                self._store_id, spans, s.selector, s.recompute_ratio, s.metric, s.check_layers, s.threshold
            ),
            None,
        )

    def _window(self) -> int:
        return self.start().max_model_len

    def _repair(self, missing: Iterable[str]) -> None:
        """Prefill chunks again whose KV was found missing or damaged, while the user reads the answer."""
        entries = [entry for entry in self._catalogue.entries_of(missing) if entry.state != "evicted"]
        if entries:
            chunks = [[entry.key, list(entry.token_ids)] for entry in entries]
            self._repairs.append(self.start().call_later("ingest", self._store_id, chunks))
            self._repairs.append(self.start().call_later("flush", self._store_id))

    # -- about it -----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Documents, chunks and bytes; per tier as well when the engine runs."""
        facts: dict[str, Any] = {
            "path": str(self.root),
            "model": self._identity.model,
            "documents": len(self._ledger.sources()),
            "chunks": asdict(self._catalogue.totals()),
        }
        if self._engine is not None and self._store_id:
            facts["tiers"] = self._call("stats")
        return facts


class _Request:
    """One question on its way: what is sent, and what comes back."""

    def __init__(
        self,
        index: BlendIndex,
        engine: Engine,
        question: str,
        top_k: int | None,
        history: Sequence[Mapping[str, str]],
        blend: bool | None,
    ) -> None:
        self._index = index
        self.plan, self._hits = index.plan(question, top_k=top_k, history=history)
        self.recipe, self._plain = index.recipe(self.plan, blend)
        self._begin = time.perf_counter()
        self._text: list[str] = []
        self._tokens = 0
        self._last: Delta | None = None

    def add(self, delta: Delta) -> None:
        self._text.append(delta.text)
        self._tokens += len(delta.token_ids)
        self._last = delta

    def answer(self) -> Answer:
        last = self._last
        assert last is not None, "the engine ends every request with a piece"
        evidence: Evidence = evidence_of(self.plan, self.recipe, self._plain, last)
        if evidence.missing:
            self._index._repair(evidence.missing)
        return Answer(
            "".join(self._text),
            tuple(Source.of(hit) for hit in self._hits),
            last.ttft_s,
            time.perf_counter() - self._begin,
            last.finish_reason,
            self._tokens,
            evidence,
        )


def _known_text(hit: Hit, entry: Entry) -> KnownText:
    return KnownText(entry.text, entry.token_ids, entry.key, hit.source)


def _did_you_mean(root: Path) -> str:
    siblings = [p.name for p in root.parent.iterdir() if p.is_dir()] if root.parent.is_dir() else []
    close = difflib.get_close_matches(root.name, siblings, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
