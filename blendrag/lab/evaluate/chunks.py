"""The questions' documents as chunks, and stores that hold the KV of those that are wanted now."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blendrag.engine.client.engine import Engine
from blendrag.engine.client.stores import StoreClient
from blendrag.errors import BlendragError
from blendrag.lab.bench.ingest import ingest_all
from blendrag.lab.evaluate.formats import Format, Question
from blendrag.lab.prompts import StoredChunk
from blendrag.prompt import encode_document
from blendrag.serving.identity import kv_identity, prefix_ids
from blendrag.settings import Settings
from blendrag.store.catalogue import Catalogue
from blendrag.store.identity import KVIdentity

Ids = tuple[int, ...]
Documents = tuple[tuple[Ids, ...], ...]  # per document its chunks


def cut(tokenizer: Any, question: Question, format: Format, chunk_tokens: int) -> Documents:
    """Every document's token ids in chunks, the last of them shorter. The user's own documents are cut into
    ``chunk_tokens`` tokens, as an index would cut them, those of public sets as the format says."""
    tokens = chunk_tokens if format.name == "jsonl" else format.cut
    whole = (encode_document(tokenizer, text) for text in question.documents)
    return tuple(
        tuple(ids[at : at + (tokens or len(ids))] for at in range(0, len(ids), tokens or len(ids)))
        for ids in whole
        if ids
    )


def unstored(documents: Documents) -> list[list[StoredChunk]]:
    """For prompts of which nothing is stored."""
    return [[StoredChunk("", ids) for ids in each] for each in documents]


@dataclass(frozen=True, slots=True)
class ChunkStore:
    """A store for one kind of KV. A question owns its chunks from the beginning to :meth:`release`."""

    store: StoreClient
    identity: KVIdentity
    catalogue: Catalogue
    batch_tokens: int
    prefix_tokens: int

    @property
    def id(self) -> str:
        """For recipes."""
        return self.store.id

    def chunks(self, documents: Documents) -> list[list[StoredChunk]]:
        return [[StoredChunk(self.identity.chunk_key(ids), ids) for ids in each] for each in documents]

    def fill(self, documents: Documents) -> None:
        """Prefill and store those chunks that are not there. Raises StoreFullError, EngineError."""
        wanted = {chunk.key: chunk for each in self.chunks(documents) for chunk in each}
        there = self.catalogue.ready(wanted)
        fresh = [chunk for key, chunk in wanted.items() if key not in there]
        ingest_all(self.store, fresh, self.batch_tokens, self.prefix_tokens)

    def release(self, question: str) -> None:
        """Delete the KV that no later question uses: a run over long documents would fill the disk."""
        if over := self.catalogue.release(question):
            self.store.delete(over)


@contextlib.contextmanager
def chunk_store(
    engine: Engine, settings: Settings, tokenizer: Any, to_come: Iterable[tuple[str, Documents]]
) -> Iterator[ChunkStore]:
    """An empty store for KV as the settings want it, gone afterwards, whatever happens.

    to_come: the ids and documents of the questions that will use it.
    """
    prefix = prefix_ids(settings, engine.model_path, tokenizer)
    identity = kv_identity(settings, engine.model_path, prefix)
    with contextlib.ExitStack() as exits:
        folder = exits.enter_context(_temporary_folder())
        catalogue = exits.enter_context(contextlib.closing(Catalogue.open(Path(folder), identity)))
        opened = StoreClient.open(engine, Path(folder), identity, settings.local_stack, prefix)
        store = ChunkStore(opened, identity, catalogue, settings.ingest_batch_tokens, len(prefix))
        try:
            for question, documents in to_come:
                chunks = [chunk for each in store.chunks(documents) for chunk in each]
                catalogue.register(question, [(chunk.key, "", chunk.token_ids) for chunk in chunks])
            yield store
        finally:
            with contextlib.suppress(BlendragError):  # the engine may be what failed
                opened.close()


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="blendrag-eval-", ignore_cleanup_errors=True)
