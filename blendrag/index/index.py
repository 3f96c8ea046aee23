"""``BlendIndex``: a folder of documents that answers questions. What a user without a framework calls."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from blendrag.chat.chat import Chat
from blendrag.chat.request import ChatRequest, check_names
from blendrag.compress import check_budget
from blendrag.embedder import Embedder
from blendrag.engine.client.running import RunningEngine
from blendrag.errors import ConfigError, EmptyIndexError
from blendrag.index.answering import Answering, AskOptions
from blendrag.index.ingest import Chunking, DocumentPipeline, IngestReport
from blendrag.index.ledger import Ledger
from blendrag.index.loaders import Item
from blendrag.index.purge import Purged, purge
from blendrag.index.retrieval import Retriever
from blendrag.index.split import Splitter
from blendrag.index.vectors import Hit, VectorStore
from blendrag.models import resolve_embedder
from blendrag.progress import Progress, progress_bar
from blendrag.prompt import Messages
from blendrag.select import make_selector
from blendrag.serving.library import Library
from blendrag.settings import Settings
from blendrag.store.maintenance.closed_index import no_index
from blendrag.text import encodable

_OF_CHUNKS = ("chunk_tokens", "chunk_overlap", "context_tokens")  # settings that make other ones


class BlendIndex(Answering):
    """A folder of documents that answers questions. Open it with :meth:`open`, close it with :meth:`close` or
    ``with``. The engine starts when needed."""

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
        self._retriever = Retriever(self._library, self._vectors)
        self._chat = Chat(settings, library=self._library)

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
        check_budget(settings.blending)
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

    def start(self, progress: Progress | None = None) -> RunningEngine:
        """Start the engine if it is not running, and return it: half a minute that the first question need
        not pay."""
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
            orphans = self._pipeline().take(items, report, bar)
            self._library.drop(orphans)
            self._library.prefill(report, bar)
        report.total_s = time.perf_counter() - begin
        return report

    def delete(self, source: str) -> None:
        """Take a document out of the index. Raises EmptyIndexError if it is not in it."""
        source = encodable(source)
        if source not in self._ledger.sources():
            raise EmptyIndexError(f"no document {source!r} in this index")
        self._library.drop(self._pipeline().remove(source))

    def purge(self, source: str) -> Purged:
        """Take a document out of the index and of every tier, servers as well, and overwrite its texts.

        Raises SourceError for an unknown document, naming the closest; StoreError if a tier cannot be
        reached, and then nothing has changed here.
        """
        return purge(encodable(source), self._library, self._pipeline())

    def _pipeline(self) -> DocumentPipeline:
        s = self.settings
        return DocumentPipeline(
            self.root,
            " ".join(f"{name}={getattr(s, name)}" for name in _OF_CHUNKS),
            Chunking(
                Splitter(self.tokenizer, chunk_tokens=s.chunk_tokens, overlap=s.chunk_overlap),
                self._library.contexts,
                self._library.catalogue,
            ),
            self._ledger,
            self._vectors,
        )

    # -- questions ----------------------------------------------------------------------------------------

    def retrieve(self, question: str, similarity_top_k: int | None = None) -> list[Hit]:
        """Return the chunks most like the question, best first. Raises EmptyIndexError without any
        documents."""
        return self._retriever.search(question, similarity_top_k)

    def warm(self, question: str, similarity_top_k: int | None = None) -> int:
        """Store the exact prefix of a question's prompt before it is asked, if there is room. Returns the
        number of nodes that are new. Raises ConfigError where exact prefixes are off, or not for this model.
        """
        self._library.start()
        if (prefixes := self._library.prefixes) is None:
            raise ConfigError("exact prefixes are off, or not for this model: give a tier tree_bytes")
        plan, _ = self._retriever.plan(question, similarity_top_k, (), self.settings.chat_template_kwargs)
        return prefixes.grow(plan)

    def _request(self, prompt: str | Messages, options: AskOptions) -> ChatRequest:
        """Make a request of a prompt: a question gets what is retrieved for it; messages are a prompt
        already."""
        check_names(options, AskOptions.__annotations__)
        asked: Any = dict(options)
        similarity_top_k, history = asked.pop("similarity_top_k", None), asked.pop("history", None) or ()
        if not isinstance(prompt, str):
            return self._chat.request(prompt, **asked)
        if not prompt.strip():
            raise ConfigError("the question is empty")
        said = [*history, {"role": "user", "content": prompt}] if history else prompt
        request = self._chat.request(said, **asked)  # a wrong option is said before anything is searched
        plan, sources = self._retriever.plan(prompt, similarity_top_k, history, request.chat_template_kwargs)
        return replace(request, plan=plan, sources=sources)

    # -- about it -----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return documents, chunks and bytes; what was counted per tier since the index was made; eviction
        and its forecasts; the documents that were reused most; and what the tiers say now, when the engine
        runs."""
        return {"documents": len(self._ledger.sources()), **self._library.stats()}
