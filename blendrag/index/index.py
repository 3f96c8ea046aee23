"""``BlendIndex``: a folder of documents that answers questions. What a user without a framework calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blendrag.chat.chat import Chat
from blendrag.chat.request import ChatRequest, Source
from blendrag.chat.tools import templated
from blendrag.engine.client.requirement import require_vllm
from blendrag.errors import ConfigError, EmptyIndexError
from blendrag.index.answering import Answering, history_and_question
from blendrag.index.ingest import LEAVING, DocumentPipeline, IngestReport
from blendrag.index.split import Splitter
from blendrag.progress import Progress
from blendrag.prompt import DocumentNote, KnownText, assemble, encode_document, turn_of
from blendrag.settings import Settings
from blendrag.text import encodable

if TYPE_CHECKING:  # both import torch, which a client of a server may be without
    from blendrag.engine.client.running import RunningEngine
    from blendrag.index.purge import Purged

_OF_CHUNKS = ("chunk_tokens", "chunk_overlap", "context_tokens")  # settings that make other ones


class BlendIndex(Answering):
    """A folder of documents that answers questions. Open it with :meth:`open`, close it with :meth:`close` or
    ``with``. The engine starts when needed."""

    def __init__(self, root: Path, settings: Settings) -> None:
        from blendrag.serving.library import Library

        self._library = Library(root, settings)
        try:
            super().__init__(root, settings)
            self._library.catalogue.release(LEAVING)  # of an ingest that was killed
        except BaseException:
            self._library.close()
            raise
        self.tokenizer: Any = self._library.tokenizer
        self._chat = Chat(settings, library=self._library)

    @classmethod
    def open(
        cls, path: str | Path, model: str | None = None, *, create: bool = True, **options: Any
    ) -> BlendIndex:
        """Open the index in folder ``path``; ``options`` are any of the settings. If no model is named, an
        index that exists is opened with the one it was made with.

        Raises ConfigError, ModelNotFoundError, StoreMismatchError (made with another model), StoreInUseError
        (open in another process), and StoreError if it does not exist and ``create`` is False.
        """
        settings = Settings.load(model=model, **options)
        require_vllm()
        from blendrag.compress import check_budget
        from blendrag.select import make_selector
        from blendrag.serving.identity import with_model_of

        make_selector(settings.blending)  # a typo is an error, not a slow answer
        check_budget(settings.blending)
        if path == "":
            raise ConfigError("the index has no name: give the path of its folder")
        root = Path(path).expanduser().resolve()
        if not create and not (root / "catalogue.sqlite").is_file():
            from blendrag.store.maintenance.closed_index import no_index

            raise no_index(path)
        return cls(root, with_model_of(root, settings))

    def close(self) -> None:
        """Finish background repairs, give the engine back, release the folder. Safe to call twice."""
        self._library.close()
        super().close()

    def start(self, progress: Progress | None = None) -> RunningEngine:
        """Start the engine if it is not running, so that no question waits for that, and return it."""
        return self._library.start(progress)

    # -- documents ----------------------------------------------------------------------------------------

    def delete(self, source: str) -> None:
        """Take a document out of the index. Raises EmptyIndexError if it is not in it."""
        source = encodable(source)
        if source not in self._ledger.sources():
            raise EmptyIndexError(f"no document {source!r} in this index")
        self._library.texts.drop(self._pipeline().remove(source))

    def purge(self, source: str) -> Purged:
        """Take a document out of the index and of every tier, servers as well, and overwrite its texts.

        Raises SourceError for an unknown document, naming the closest; StoreError if a tier cannot be
        reached, and then nothing has changed here.
        """
        from blendrag.index.purge import purge

        return purge(encodable(source), self._library, self._pipeline())

    def _pipeline(self) -> DocumentPipeline:
        s, library = self.settings, self._library
        splitter = Splitter(self.tokenizer, chunk_tokens=s.chunk_tokens, overlap=s.chunk_overlap)
        return DocumentPipeline(
            self.root,
            " ".join(f"{name}={getattr(s, name)}" for name in _OF_CHUNKS),
            lambda text: library.contexts.document(splitter.split(text)),
            self._ledger,
            self._vectors,
            library.catalogue,
        )

    def _keep(self, orphans: list[str], report: IngestReport, bar: Progress) -> None:
        self._library.texts.drop(orphans)
        self._library.texts.prefill(report, bar)

    # -- questions ----------------------------------------------------------------------------------------

    def warm(self, question: str, similarity_top_k: int | None = None) -> int:
        """Store the exact prefix of a question's prompt before it is asked, if there is room. Returns the
        number of nodes that are new. Raises ConfigError where exact prefixes are off, or not for this model.
        """
        self._library.start()
        if (prefixes := self._library.sidecars.prefixes) is None:
            raise ConfigError("exact prefixes are off, or not for this model: give a tier tree_bytes")
        plan = self._request(question, {"similarity_top_k": similarity_top_k}).plan
        return prefixes.grow(plan) if plan else 0

    @property
    def _window(self) -> int:
        return self._library.start().max_model_len

    def _asking(
        self, request: ChatRequest, found: Sequence[Source], left_out: Sequence[Source]
    ) -> ChatRequest:
        library, s = self._library, self.settings
        history, question = history_and_question(request)
        chunks = {
            one.key: one for one in library.catalogue.entries_of(hit.key for hit in [*found, *left_out])
        }
        known = [
            KnownText(one.text, one.token_ids, hit.key, hit.source)
            if (one := chunks.get(hit.key))
            # Of a document whose ingest was killed, or failed, the chunk may have left the catalogue.
            else KnownText(hit.text, encode_document(library.tokenizer, hit.text), hit.key, hit.source)
            for hit in found
        ]
        known = [known[place] for place in library.sidecars.order([text.key for text in known])]
        stuffed = s.separator.join([*(text.text for text in known), question])
        turn = turn_of(library.tokenizer, s.system_prompt, stuffed, s.separator, history)
        messages, options = templated(library.tokenizer, replace(request, messages=turn))
        plan = assemble(library.tokenizer, messages, documents=known, template_options=options)
        sizes = {key: len(chunk.token_ids) for key, chunk in chunks.items()}
        notes = [
            DocumentNote(hit.source, False, "no room in the model's window", sizes.get(hit.key, 0), 0)
            for hit in left_out
        ]
        return replace(request, plan=replace(plan, notes=(*plan.notes, *notes)))

    # -- about it -----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return documents, chunks and bytes; what was counted per tier since the index was made; eviction
        and its forecasts; the documents that were reused most; and what the tiers say now, when the engine
        runs."""
        return {**super().stats(), **self._library.stats()}
