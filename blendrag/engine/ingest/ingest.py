"""The worker's half of ingest: chunks are prefilled, written, looked for and deleted, in slices."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from blendrag.engine.forward.prompt_forward import LoadedModel, Stopwatch
from blendrag.engine.hooks import WorkerHook
from blendrag.engine.ingest.chunk_prefill import ChunkPrefill, ChunkTokens
from blendrag.engine.jobs import POLL_S, by_owner
from blendrag.engine.stores import OpenStore, Stores
from blendrag.engine.wire.operations import Deleted, Ingested
from blendrag.errors import StoreError
from blendrag.store.contexts import Ids
from blendrag.store.identity import context_name
from blendrag.store.kv_store import KVStore

T = TypeVar("T")


@dataclass(slots=True)
class _Filling:
    """A store that chunks are prefilled for."""

    opened: OpenStore
    prefill: ChunkPrefill
    writes: list[Future[int]] = field(default_factory=list)

    @property
    def kv(self) -> KVStore:
        """Return the store, which only the owner has."""
        assert isinstance(self.opened.kv, KVStore)
        return self.opened.kv


class Ingest(WorkerHook):
    """The ingest of one loaded model. ``writer`` stores what was prefilled, and deletes after that. owner:
    whether this engine stores."""

    name = "ingest"

    def __init__(self, model: LoadedModel, stores: Stores, writer: Executor, *, owner: bool) -> None:
        self._model, self._stores, self._writer, self._owner = model, stores, writer, owner
        self._ranks = model.ranks
        self._filling: dict[str, _Filling] = {}
        self._stream: torch.cuda.Stream | None = None

    @property
    def operations(self) -> Mapping[str, Callable[..., Any]]:
        return {"ingest": self.ingest, "flush": self.flush, "delete": self.delete, "check": self.check}

    def closing(self, store: str) -> None:
        filling = self._filling.pop(store, None)
        if filling is None:
            return
        wait(filling.writes)
        self._writer.submit(lambda: None).result()  # what was begun there before has ended
        for write in filling.writes:
            write.result()

    def delete(
        self, store: str, keys: Sequence[str], everywhere: bool = False
    ) -> Generator[bool, None, Deleted]:
        filling = self._of(store)
        filling.prefill.forget()
        delete = partial(filling.opened.kv.delete, keys, everywhere=everywhere)
        chunks, unreachable = yield from by_owner(self._ranks, self._writer, delete)
        if not self._ranks.first and self._filling.get(store) is filling:  # it may have closed meanwhile
            delete()
        return Deleted(chunks, tuple(unreachable))

    def check(
        self, store: str, chunks: Sequence[tuple[str, Ids, Ids, str]]
    ) -> Generator[bool | None, None, None]:
        """Ingest those of the chunks that no tier has (any more)."""
        filling = self._of(store)
        if self._owner:
            keys = [key for key, *_ in chunks]
            lost = set((yield from by_owner(self._ranks, self._writer, lambda: filling.kv.check(keys))))
            yield from self.ingest(store, [chunk for chunk in chunks if chunk[0] in lost])

    def ingest(
        self, store: str, chunks: Sequence[tuple[str, Ids, Ids, str]]
    ) -> Generator[bool | None, None, Ingested]:
        """Prefill (key, token ids, context, after), except those that a shared tier has. They are written
        while the next call computes. Raises the error of an earlier write."""
        filling = self._of(store)
        if not self._owner:
            return Ingested(0, 0, 0.0, 0)
        wanted = [(key, ids) for key, ids, *_ in chunks]
        adopted = yield from by_owner(self._ranks, self._writer, lambda: filling.kv.adopt(wanted))
        fresh = [
            ChunkTokens(key, tuple(ids), tuple(context), after)
            for key, ids, context, after in chunks
            if key not in adopted
        ]
        seconds, tensors = (yield from _timed(filling.prefill.run(fresh))) if fresh else (0.0, [])
        written = yield from self._drained(filling)
        if self._filling.get(store) is not filling:
            raise StoreError("the store was closed while chunks were prefilled for it: ingest again")
        for chunk, own in zip(fresh, tensors, strict=True):
            kv = self._ranks.whole(own, filling.opened.kv.layout.heads)
            if kv is not None:
                name = context_name(chunk.context, chunk.after)
                drafts = self._model.stored_drafts
                put = partial(filling.kv.put, chunk.key, chunk.token_ids, kv, name, drafts)
                filling.writes.append(self._writer.submit(self._behind(kv.device, put)))
        return Ingested(
            tokens=sum(len(chunk.token_ids) for chunk in fresh),
            adopted=sum(len(ids) for key, ids, *_ in chunks if key in adopted),
            seconds=seconds,
            nbytes=written,
        )

    def _behind(self, device: torch.device, work: Callable[[], T]) -> Callable[[], T]:
        """Return ``work`` for the writer: on a GPU it waits for what this thread has launched, and does not
        wait for what this thread launches next."""
        if device.type != "cuda":
            return work
        self._stream = stream = self._stream or torch.cuda.Stream(device)
        launched = torch.cuda.current_stream(device).record_event()

        def run() -> T:
            with torch.cuda.stream(stream):
                stream.wait_event(launched)
                return work()

        return run

    def flush(self, store: str) -> Generator[bool, None, int]:
        """Wait for all writes. Returns the bytes written since the last call."""
        return (yield from self._drained(self._of(store)))

    def _of(self, store: str) -> _Filling:
        opened = self._stores.get(store)
        if store not in self._filling:
            model = self._model
            prefill = ChunkPrefill(model.decoder, model.cache, opened.prefix, model.drafts)
            self._filling[store] = _Filling(opened, prefill)
        return self._filling[store]

    def _drained(self, filling: _Filling) -> Generator[bool, None, int]:
        """Wait for all writes that were begun. Then returns their bytes, or raises the first one's error."""
        writes = tuple(filling.writes)
        while self._ranks.choose(bool(wait(writes, timeout=POLL_S).not_done)):
            yield True
        counted = [write for write in writes if write in filling.writes]  # otherwise somebody else has waited
        filling.writes = [write for write in filling.writes if write not in writes]
        return self._ranks.outcome(lambda: sum(write.result() for write in counted))


def _timed(work: Generator[None, None, T]) -> Generator[None, None, tuple[float, T]]:
    """Run the work. Returns the seconds that it took, without pauses, and its result."""
    watch = Stopwatch()
    while True:
        try:
            next(work)
        except StopIteration as end:
            return watch.total_s, end.value
        watch.pause()
        yield
        watch.resume()
