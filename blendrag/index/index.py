"""``BlendIndex``: a folder of documents that answers questions. What a user without a framework calls."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Unpack

from blendrag.embedder import Embedder
from blendrag.engine.client.engine import Engine
from blendrag.errors import EmptyIndexError
from blendrag.index import asking
from blendrag.index.answer import Answer
from blendrag.index.asking import AnswerStream, AskOptions
from blendrag.index.ingest import DocumentPipeline, IngestReport
from blendrag.index.ledger import Ledger
from blendrag.index.loaders import Item
from blendrag.index.prompting import Prompter
from blendrag.index.purge import Purged, purge
from blendrag.index.split import Splitter
from blendrag.index.vectors import Hit, VectorStore
from blendrag.models import resolve_embedder
from blendrag.progress import Progress, progress_bar
from blendrag.select import make_selector
from blendrag.serving.forecaster import FORECASTS
from blendrag.serving.library import Library, Messages
from blendrag.settings import Settings
from blendrag.store.maintenance.closed_index import no_index

_MOST_REUSED = 10  # documents, in stats


class BlendIndex:
    """Open with :meth:`open`, close with :meth:`close` or ``with``. The engine starts when needed.

    A prompt is a question (a string), answered from the documents most like it; or messages,
    ``{"role": ..., "content": ...}``, in which ingested texts are recognised by content.
    """

    def __init__(self, root: Path, settings: Settings) -> None:
        self.root, self.settings = root, settings
        self._library = Library(root, settings)
        try:
            embedder = Embedder(resolve_embedder(settings.embedder), name=settings.embedder)
            self._vectors = VectorStore(root, embedder)
            self._ledger = Ledger(root)
        except BaseException:
            self._library.close()
            raise
        self.tokenizer: Any = self._library.tokenizer
        self._prompter = Prompter(self._library, self._vectors)

    @classmethod
    def open(
        cls, path: str | Path, model: str | None = None, *, create: bool = True, **options: Any
    ) -> BlendIndex:
        """Open the index in folder ``path``; ``options`` are any of the settings.

        Raises ConfigError, ModelNotFoundError, StoreMismatchError (made with another model), StoreInUseError
        (open in another process), and StoreError if it does not exist and ``create`` is False.
        """
        settings = Settings.load(model=model, **options)
        make_selector(settings.blending)  # a typo is an error, not a slow answer
        root = Path(path).expanduser().resolve()
        if not create and not (root / "catalogue.sqlite").is_file():
            raise no_index(path)
        return cls(root, settings)

    def __enter__(self) -> BlendIndex:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish background repairs, give the engine back, release the folder. Safe to call twice."""
        self._library.close()
        self._ledger.close()

    def start(self, progress: Progress | None = None) -> Engine:
        """The engine, started if it is not running: half a minute that the first question need not pay."""
        return self._library.start(progress)

    # -- documents ----------------------------------------------------------------------------------------

    def ingest(self, items: Item | Iterable[Item], *, progress: bool | None = None) -> IngestReport:
        """Make the index hold ``items``: paths, folders, texts, or documents.

        Unchanged documents are skipped, changed ones replaced, files deleted from a given folder removed.
        May be interrupted and repeated. ``progress``: show a bar; None: if someone is watching.
        Raises SourceError for a wrong path, StoreFullError when the disk is full.
        """
        begin = time.perf_counter()
        report = IngestReport()
        with progress_bar(progress) as bar:
            try:
                orphans = self._pipeline().take(items, report, bar)
            finally:
                self._library.documents_changed()
            self._library.drop(orphans)
            self._library.prefill(report, bar)
        report.total_s = time.perf_counter() - begin
        return report

    def delete(self, source: str) -> None:
        """Take a document out of the index. Raises EmptyIndexError if it is not in it."""
        if source not in self._ledger.sources():
            raise EmptyIndexError(f"no document {source!r} in this index")
        self._library.drop(self._pipeline().remove(source))

    def purge(self, source: str) -> Purged:
        """Take a document out of the index and of every tier, servers as well, and overwrite its texts.

        Raises SourceError for an unknown document, naming the closest; StoreError if a tier cannot be
        reached, and then nothing has changed here.
        """
        return purge(source, self._library, self._pipeline())

    def _pipeline(self) -> DocumentPipeline:
        s = self.settings
        return DocumentPipeline(
            self.root,
            self._library.identity,
            f"chunk_tokens={s.chunk_tokens} chunk_overlap={s.chunk_overlap}",
            Splitter(self.tokenizer, chunk_tokens=s.chunk_tokens, overlap=s.chunk_overlap),
            self._ledger,
            self._library.catalogue,
            self._vectors,
        )

    # -- questions ----------------------------------------------------------------------------------------

    def retrieve(self, question: str, top_k: int | None = None) -> list[Hit]:
        """The chunks most like the question, best first. Raises EmptyIndexError without any documents."""
        return self._prompter.retrieve(question, top_k)

    def explain(self, prompt: str | Messages, **options: Unpack[AskOptions]) -> list[dict[str, Any]]:
        """What would be reused, without asking: a row per segment of the prompt, then the documents that
        are not in it; each with tokens, tokens reused, and why not more."""
        return self._library.explain(asking.make_prompt(self._prompter, prompt, options).plan)

    def ask(self, prompt: str | Messages, **options: Unpack[AskOptions]) -> Answer:
        """Answer a prompt. Raises EmptyIndexError, PromptTooLongError."""
        stream = self.stream(prompt, **options)
        for _ in stream:
            pass
        assert stream.answer is not None, "a stream that ended without an error has its answer"
        return stream.answer

    def stream(self, prompt: str | Messages, **options: Unpack[AskOptions]) -> AnswerStream:
        """``ask``, piece by piece. Closing the stream stops the generation."""
        return AnswerStream(asking.stream(self._prompter, prompt, options))

    async def aask(self, prompt: str | Messages, **options: Unpack[AskOptions]) -> Answer:
        """``ask`` for an event loop, which is not blocked. Cancelling it stops the generation."""
        answer: Answer | None = None
        async for piece in self.astream(prompt, **options):
            answer = piece if isinstance(piece, Answer) else None
        assert answer is not None, "a stream that ended without an error has its answer"
        return answer

    def astream(self, prompt: str | Messages, **options: Unpack[AskOptions]) -> AsyncIterator[str | Answer]:
        """Pieces of text, and at the end the :class:`Answer`."""
        return asking.astream(self._prompter, prompt, options)

    # -- eviction -----------------------------------------------------------------------------------------

    def use_policy(self, name: str) -> None:
        """Have another policy say which chunks leave the full tiers of this machine, also while the engine
        runs.

        Lasts until the index is closed: the setting is ``eviction``. Raises ConfigError for an unknown one.
        """
        self._library.use_policy(name)

    # -- about it -----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Documents, chunks and bytes; what was counted per tier since the index was made; eviction and its
        forecasts; the documents that were reused most; and what the tiers say now, when the engine runs."""
        catalogue = self._library.catalogue
        facts: dict[str, Any] = {
            "path": str(self.root),
            "model": self._library.identity.model,
            "documents": len(self._ledger.sources()),
            "chunks": asdict(catalogue.totals()),
            "counters": {name: counts for name, counts in catalogue.counters().items() if name != FORECASTS},
            "eviction": self._library.eviction(),
            "reuse": [asdict(row) for row in catalogue.reuse(_MOST_REUSED)],
        }
        if store := self._library.session.store:
            facts |= asdict(store.stats())
        return facts
