"""The mixin of all warming stores: KV is computed for what is added, released with what is removed, and read
ahead for what is found."""

from __future__ import annotations

import functools
import inspect
import logging
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import islice
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.runnables import run_in_executor
from langchain_core.vectorstores import VectorStore

from blendrag import progress_bar, spellings
from blendrag.errors import ConfigError, SourceError, noting
from langchain_blendrag._ingest import ChunkIngestReport, Notes, identified, token_splitter

if TYPE_CHECKING:
    from langchain_text_splitters import TextSplitter

    from blendrag import KeptDocuments, PrefillReport, Progress, SyncReport
    from langchain_blendrag.chat_models import ChatBlend

PAGE = 1000
"""Documents that a store is asked for at once."""
_BATCH = 32  # chunks that an interrupted ``ingest`` loses at most
_log = logging.getLogger(__name__)
_SEARCH = re.compile(r"a?(similarity|max_marginal_relevance|hybrid)_search")
# Stores call their own methods: only the outermost call is of interest.
_quiet: ContextVar[WarmingStore | None] = ContextVar("blendrag_quiet_store", default=None)

# A function that follows a call: it gets the store, the arguments (the first as ``first``), and the result.
Then = Callable[["WarmingStore", Mapping[str, Any], Any], None]


def keeping(llm: ChatBlend | None) -> ChatBlend | None:
    """Return the model whose KV is to be kept. Raises ConfigError for one that keeps none."""
    if llm is not None and not hasattr(llm, "chat"):
        raise ConfigError(f"llm has to be a ChatBlend, whose engine keeps KV, not a {type(llm).__name__}")
    return llm


class WarmingStore(VectorStore):
    """A mixin in front of a vector store's class. Without ``llm`` it does nothing.

    A subclass says how its documents are added and removed; searches are found by their names.
    """

    llm: ChatBlend | None = None
    """The model whose KV is kept. May be set, changed or removed at any time; ``sync()`` then catches up."""
    _follows: dict[str, Any]  # searches of parents, as this class follows them

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._follows = {}
        for name in filter(_SEARCH.match, dir(cls)):
            # One that a parent only follows is not its own: another parent's may come before it.
            owner = next(
                base
                for base in cls.__mro__
                if vars(base).get(name) is not vars(base).get("_follows", {}).get(name)
            )
            own, inherited = getattr(owner, name), getattr(cls, name)
            if owner is cls or not issubclass(owner, WarmingStore):  # whose own searches are followed already
                inherited = getattr(inherited, "__wrapped__", None)
            # LangChain's defaults call methods that are followed.
            if owner is not VectorStore and inherited != own:
                setattr(cls, name, made := followed(own, _prefetch))
                if owner is not cls:
                    cls._follows[name] = made

    def ingest(
        self,
        documents: Iterable[Document],
        *,
        show_progress: bool = True,
        text_splitter: TextSplitter | None = None,
    ) -> ChunkIngestReport:
        """Split documents, store the chunks, compute their KV: a batch at a time, with a progress bar.

        Chunks have ids by source and text, so a second run, or one after an interrupt, does what is missing.
        Nothing is removed: for sources that change, use LangChain's indexing API.

        Args:
            documents: Documents of any length.
            show_progress: Whether to show a bar on standard error.
            text_splitter: By default, one that measures in the model's own tokens (setting
                ``chunk_tokens``).

        Raises:
            ConfigError: If there is neither a text splitter nor an ``llm`` to measure with, or each addition
                replaces what the store holds.
            BlendragError: If KV cannot be computed. What was stored stays; the next run goes on.
        """
        if text_splitter is None:
            if self.llm is None:
                raise ConfigError(
                    "ingest() measures chunks in the model's tokens: give llm=, or text_splitter="
                )
            text_splitter = token_splitter(self.llm.chat)
        if getattr(self, "mode", None) == "overwrite" and not getattr(self, "api_key", None):
            # LanceDB's default, of which its cloud takes no notice.
            raise ConfigError(
                "this store keeps only what was added last: make it with mode='append' for ingest()"
            )
        chunks, report = identified(text_splitter.split_documents(documents)), ChunkIngestReport()
        present = set[str]()
        with suppress(ConfigError, SourceError):  # of a store that cannot tell, all is added
            present = self._present(id for id, _ in chunks)
        with progress_bar(show_progress) as bar:
            bar.note("ingest")
            bar.total(len(chunks))
            before: dict[str, tuple[str, Document]] = {}  # the last of every source
            for batch in (chunks[at : at + _BATCH] for at in range(0, len(chunks), _BATCH)):
                missing = [(id, chunk) for id, chunk in batch if id not in present]
                if missing:
                    with self._quietly():
                        self.add_documents([chunk for _, chunk in missing], ids=[id for id, _ in missing])
                report.added += len(missing)
                report.skipped += len(batch) - len(missing)
                # Those present too: an earlier run may have ended between storing and warming.
                # And those of the batch before that this one's first chunks are read behind.
                if done := self._warm(dict([*before.values(), *batch]), Notes(bar)):
                    report.count(done)
                bar.advance(len(batch))
                before = {str(chunk.metadata.get("source")): (id, chunk) for id, chunk in batch}
        return report

    def sync(self, *, show_progress: bool | None = None) -> SyncReport:
        """Keep the KV of exactly the documents that the store holds now.

        Repairs what was missed: documents stored without ``llm``, by other programs, or before a failure.

        Args:
            show_progress: Whether to show a bar; by default, if standard error is a terminal.

        Raises:
            ConfigError: If there is no ``llm``, or the store cannot list its documents.
        """
        if self.llm is None:
            raise ConfigError("sync() needs a model: give the store one, as in store.llm = ChatBlend()")
        texts, sources = _parts_of(self._documents())
        return self._collection_of_kv().sync(texts, sources=sources, progress=show_progress)

    # -- what a kind of store tells -----------------------------------------------------------------------

    @abstractmethod
    def _kv_name(self) -> str:
        """Return a name that tells this store's documents from others', now and in later processes."""

    @abstractmethod
    def _documents(self) -> Mapping[str, Document]:
        """Return all documents by id, in order. Raises ConfigError if they cannot be listed."""

    def _present(self, ids: Iterable[str]) -> set[str]:
        """Return those of ``ids`` that are stored, maybe with other dashes. Raises ConfigError if the store
        can neither be asked by ids nor listed."""
        wanted = list(ids)
        named: Iterable[Any]
        try:
            pages = (self.get_by_ids(wanted[at : at + PAGE]) for at in range(0, len(wanted), PAGE))
            # Qdrant's documents have theirs in the metadata.
            named = [one.id or one.metadata.get("_id") for page in pages for one in page]
        except NotImplementedError:
            named = self._documents()
        forms = {form for id in named if id is not None for form in spellings(str(id))}
        return {id for id in wanted if id in forms}

    # -- the KV of its documents --------------------------------------------------------------------------

    @property
    def _warms(self) -> bool:
        return self.llm is not None and _quiet.get() is not self

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """Have the store neither warm nor release nor read ahead for what it does inside this."""
        token = _quiet.set(self)
        try:
            yield
        finally:
            _quiet.reset(token)

    def _collection_of_kv(self) -> KeptDocuments:
        assert self.llm is not None, "callers have checked"
        return self.llm.chat.collection(self._kv_name())

    def _warm(
        self, documents: Mapping[str, Document], progress: Progress | None = None
    ) -> PrefillReport | None:
        if not (self._warms and documents):
            return None
        with noting("The documents are stored; sync() computes the KV that is missing."):
            texts, sources = _parts_of(documents)
            return self._collection_of_kv().add(texts, sources=sources, progress=progress or False)

    def _forget(self, ids: Iterable[str]) -> None:
        if self._warms:
            with noting("The documents are removed; sync() releases their KV."):
                self._collection_of_kv().remove(form for id in ids for form in spellings(id))

    def _forget_all(self) -> None:
        if self._warms:
            with noting("The documents are removed; sync() releases their KV."):
                self._collection_of_kv().clear()

    def _forget_missing(self) -> None:
        """Forget the documents that are not in the store any more."""
        if self._warms:
            known = self._collection_of_kv().ids()
            try:
                gone = known - self._present(known)
            except ConfigError:
                _log.warning("%s cannot tell what it removed: KV of it may be kept", type(self).__name__)
            else:
                self._forget(gone)


def _parts_of(documents: Mapping[str, Document]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return texts by id; and the sources that they are parts of, as loaders write them into the metadata."""
    texts = {id: [document.page_content] for id, document in documents.items()}
    sources = {id: document.metadata.get("source") for id, document in documents.items()}
    return texts, {id: str(source) for id, source in sources.items() if source}


def _prefetch(store: WarmingStore, arguments: Mapping[str, Any], found: Any) -> None:
    """Begin to read the KV of what was found, while the prompt is still being made, and put it into the order
    that the setting asks for. A search never fails because of it, and opens and starts nothing."""
    if not store._warms:
        return
    assert store.llm is not None, "or it would not warm"
    try:
        documents = [one[0] if isinstance(one, tuple) else one for one in found]
        texts = [document.page_content for document in documents]
        store.llm.chat.prefetch(texts)
        if isinstance(found, list):
            found[:] = [found[place] for place in store.llm.chat.order(texts)]
    except Exception:
        _log.debug("could not read KV ahead", exc_info=True)


def followed(
    method: Callable[..., Any], then: Then, each: Callable[[Any], Any] | None = None
) -> Callable[..., Any]:
    """Return a store's method with ``then`` after it succeeded; in a thread if the method is async. It gets
    what ``each`` makes of the items in its first argument."""
    signature = inspect.signature(method)
    first = next(islice(signature.parameters, 1, None), "")

    def bind(*args: Any, **kwargs: Any) -> tuple[inspect.BoundArguments, Mapping[str, Any]]:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments.get(first)
        if isinstance(given, Iterator):  # it is read twice
            bound.arguments[first] = given = list(given)
        if each is not None and isinstance(given, list):
            bound.arguments[first] = given = [each(item) for item in given]
        return bound, {**bound.kwargs, **bound.arguments, "first": given}

    @functools.wraps(method)
    def call(self: WarmingStore, *args: Any, **kwargs: Any) -> Any:
        bound, arguments = bind(self, *args, **kwargs)
        with self._quietly():
            result = method(*bound.args, **bound.kwargs)
        then(self, arguments, result)
        return result

    @functools.wraps(method)
    async def acall(self: WarmingStore, *args: Any, **kwargs: Any) -> Any:
        bound, arguments = bind(self, *args, **kwargs)
        with self._quietly():
            result = await method(*bound.args, **bound.kwargs)
        await run_in_executor(None, then, self, arguments, result)
        return result

    return acall if inspect.iscoroutinefunction(method) else call
