"""The data plane inside a worker: stores, ingest prefill, and fused prefill of requests."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from blendrag.control.estimate import Estimator
from blendrag.control.profile import Profile
from blendrag.engine.blend.blending import Choices, LoadedModel, RequestBlend
from blendrag.engine.budget.compression import Compression
from blendrag.engine.client.watchdog import ENDS_WITHIN_S
from blendrag.engine.forward.ranks import attempt
from blendrag.engine.forward.slices import BlendQueue, Pace, Sliced, StepClock, beside
from blendrag.engine.ingest.chunk_prefill import ChunkPrefill, ChunkTokens
from blendrag.engine.ingest.jobs import POLL_S, Jobs
from blendrag.engine.prefixes.exact_prefixes import ExactPrefixes, behind
from blendrag.engine.wire.operations import Deleted, Ingested, StoreStats
from blendrag.engine.wire.prefixes import NodeLoad
from blendrag.engine.wire.recipe import BlendOrder, EvictionOrder
from blendrag.engine.wire.report import BlendReport, Eviction
from blendrag.errors import ConfigError, StoreError
from blendrag.load.loader import LayerLoader
from blendrag.load.prefetch import Prefetcher
from blendrag.store.contexts import Ids
from blendrag.store.identity import KVIdentity, context_name, prefix_name
from blendrag.store.kv_reader import KVReader
from blendrag.store.kv_store import KVStore
from blendrag.store.tiers import Tier, TierSpec
from blendrag.store.tiers.local import Forecast

_KEPT_REPORTS = 256

T = TypeVar("T")


@dataclass(slots=True)
class _OpenStore:
    kv: KVReader
    prefetcher: Prefetcher
    estimate: Estimator | None
    prefill: ChunkPrefill
    writes: list[Future[int]] = field(default_factory=list)


class DataPlane:
    """The stores and blends of one loaded model. Methods run on the worker's own thread, between or inside
    engine steps, and on all ranks alike."""

    def __init__(self, model: LoadedModel, share: float = 1.0, *, owner: bool = True) -> None:
        """Serve the model without any store yet. owner: whether this engine stores; of data parallel engines
        the first one does, and all read."""
        self.model, self.ranks, self._owner = model, model.ranks, owner
        self.compression = Compression.of(model.decoder, model.cache, model.ranks.size)
        self.clock = StepClock()
        self.jobs = Jobs(self.clock, share, self.ranks)
        self._loader = LayerLoader()
        self._stores: dict[str, _OpenStore] = {}
        self._reports: OrderedDict[str, BlendReport] = OrderedDict()
        self._choices = Choices()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="blendrag-writer")
        dtype = str(model.decoder.dtype).removeprefix("torch.")
        self.prefixes = ExactPrefixes(model.cache, dtype, self._writer)
        self.queue = BlendQueue(self.blend, self.ranks)

    # -- stores -------------------------------------------------------------------------------------------

    def open_store(
        self,
        root: str,
        identity: dict[str, Any],
        stack: Sequence[dict[str, Any]],
        prefix: Sequence[int] = (),
        profile: dict[str, Any] | None = None,
        lock: int = 0,
    ) -> str:
        """Open the store in folder ``root``, and return its id. Arguments as :meth:`StoreClient.open` sends
        them."""
        kind = KVIdentity(**identity)
        named = prefix_name(kind.prefix_kind, prefix)
        assert named == kind.prefix, "chunks would be stored under another prefix's name"
        if root not in self._stores:
            estimate = Estimator.of(Profile.model_validate(profile)) if profile else None
            specs = [TierSpec.model_validate(spec) for spec in stack]
            kv = self._open_on_all(lambda: self._open_kv(Path(root), kind, specs, lock))
            prefill = ChunkPrefill(self.model.decoder, self.model.cache, tuple(prefix))
            self._stores[root] = _OpenStore(kv, Prefetcher(kv), estimate, prefill)
        return root

    def _open_on_all(self, open_kv: Callable[[], KVReader]) -> KVReader:
        """Open it on every rank, or on none: otherwise only some would take part in what all do at the next
        attempt."""
        kv, error = attempt(open_kv)
        error = next(filter(None, self.ranks.everyone(error)), None)
        if error is not None:
            if kv is not None:
                kv.close()
            raise error
        assert kv is not None
        return kv

    def _open_kv(self, root: Path, kind: KVIdentity, stack: Sequence[TierSpec], lock: int) -> KVReader:
        """Open the owner's first, with the lock: the others find what it has made."""
        ranks, heads = self.ranks, kind.num_kv_heads
        own, shards = ranks.heads(heads), ranks.shards(heads)
        dtype = str(self.model.decoder.dtype).removeprefix("torch.")
        stack = [spec.share(len(own) / heads) for spec in stack] if shards > 1 else stack
        if not self._owner:
            if all(spec.kind == "ram" for spec in stack):
                raise ConfigError("data parallel engines cannot share KV by RAM alone: add a tier below it")
            return KVReader.open(root, kind, dtype, stack, own, shards)
        opened, holds = list[KVReader](), (ENDS_WITHIN_S if lock else None, lock)
        ranks.outcome(lambda: opened.append(KVStore.open(root, kind, dtype, stack, own, shards, *holds)))
        return opened[0] if ranks.first else KVReader.open(root, kind, dtype, stack, own, shards)

    def _opened(self, store: str) -> _OpenStore:
        if store not in self._stores:
            raise StoreError(f"the store {store!r} is not open in the engine")
        return self._stores[store]

    def close_store(self, store: str) -> None:
        opened = self._stores.pop(store, None)
        if opened:
            self.queue.stop(store)
            opened.prefetcher.close()
            self._loader.drain()
            try:
                wait(opened.writes)
                self._writer.submit(lambda: None).result()  # what was begun there before has ended
                for write in opened.writes:
                    write.result()
            finally:
                opened.kv.close()

    def close(self) -> None:
        """Close all stores. Raises the error of one of them after all are closed."""
        with ExitStack() as stack:
            stack.callback(self.prefixes.close)
            for store in tuple(self._stores):
                stack.callback(self.close_store, store)

    def store(self, store: str) -> KVReader:
        return self._opened(store).kv

    @property
    def tiers(self) -> list[Tier]:
        """Return the tiers of all open stores and trees that count for the engine: the owner's."""
        if not self.ranks.first:
            return []
        return [tier for opened in self._stores.values() for tier in opened.kv.tiers] + self.prefixes.tiers

    def prefetch(self, store: str, keys: Sequence[str]) -> None:
        """Begin to read chunks into memory while the engine takes its steps. Returns at once."""
        self._opened(store).prefetcher.begin(keys)

    def delete(
        self, store: str, keys: Sequence[str], everywhere: bool = False
    ) -> Generator[bool, None, Deleted]:
        opened = self._opened(store)
        opened.prefill.forget()
        delete = partial(opened.kv.delete, keys, everywhere=everywhere)
        chunks, unreachable = yield from self._by_owner(delete)
        if not self.ranks.first:
            delete()
        return Deleted(chunks, tuple(unreachable))

    def check(
        self, store: str, chunks: Sequence[tuple[str, Ids, Ids, str]]
    ) -> Generator[bool | None, None, None]:
        """Ingest those of the chunks that no tier has (any more)."""
        opened = self._opened(store)
        if self._owner:
            keys = [key for key, *_ in chunks]
            lost = set((yield from self._by_owner(lambda: _stored(opened).check(keys))))
            yield from self.ingest(store, [chunk for chunk in chunks if chunk[0] in lost])

    def empty_ram(self, store: str) -> None:
        self.store(store).empty_ram()

    def forecast(self, store: str, forecasts: Sequence[Forecast]) -> None:
        self.store(store).forecast(forecasts)

    def stats(self, store: str) -> StoreStats:
        opened = self._opened(store)
        return StoreStats(opened.kv.stats(), opened.prefetcher.stats(), opened.kv.policy_stats())

    # -- ingest -------------------------------------------------------------------------------------------

    def ingest(
        self, store: str, chunks: Sequence[tuple[str, Ids, Ids, str]]
    ) -> Generator[bool | None, None, Ingested]:
        """Prefill (key, token ids, context, after), except those that a shared tier has. They are written
        while the next call computes. Raises the error of an earlier write."""
        opened = self._opened(store)
        if not self._owner:
            return Ingested(0, 0, 0.0, 0)
        wanted = [(key, ids) for key, ids, *_ in chunks]
        adopted = yield from self._by_owner(lambda: _stored(opened).adopt(wanted))
        fresh = [
            ChunkTokens(key, tuple(ids), tuple(context), after)
            for key, ids, context, after in chunks
            if key not in adopted
        ]
        seconds, tensors = (yield from _timed(opened.prefill.run(fresh))) if fresh else (0.0, [])
        written = yield from self._drained(opened)
        if self._stores.get(store) is not opened:
            raise StoreError("the store was closed while chunks were prefilled for it: ingest again")
        for chunk, own in zip(fresh, tensors, strict=True):
            kv = self.ranks.whole(own, opened.kv.layout.heads)
            if kv is not None:
                name = context_name(chunk.context, chunk.after)
                put = partial(_stored(opened).put, chunk.key, chunk.token_ids, kv, name)
                opened.writes.append(self._writer.submit(put))
        return Ingested(
            tokens=sum(len(chunk.token_ids) for chunk in fresh),
            adopted=sum(len(ids) for key, ids, *_ in chunks if key in adopted),
            seconds=seconds,
            nbytes=written,
        )

    def flush(self, store: str) -> Generator[bool, None, int]:
        """Wait for all writes. Returns the bytes written since the last call."""
        return (yield from self._drained(self._opened(store)))

    def _drained(self, opened: _OpenStore) -> Generator[bool, None, int]:
        """Wait for all writes that were begun, and return their bytes. Raises the first one's error once all
        have ended."""
        writes = tuple(opened.writes)
        while self.ranks.choose(bool(wait(writes, timeout=POLL_S).not_done)):
            yield True
        counted = [write for write in writes if write in opened.writes]  # otherwise somebody else has waited
        opened.writes = [write for write in opened.writes if write not in writes]
        return self.ranks.outcome(lambda: sum(write.result() for write in counted))

    def _by_owner(self, work: Callable[[], T]) -> Generator[bool, None, T]:
        """Run work in another thread of the owner's, and wait for it between the engine's steps."""
        begun = self._writer.submit(work) if self.ranks.first else Future[T]()
        while self.ranks.choose(self.ranks.first and bool(wait([begun], timeout=POLL_S).not_done)):
            yield True
        return self.ranks.outcome(begun.result)

    # -- requests -----------------------------------------------------------------------------------------

    def wait_for_device(self) -> None:
        """Wait until the device has done all that this thread has launched."""
        device = self.model.cache.device
        if device.type != "cpu":
            torch.accelerator.current_stream(device).synchronize()

    def blend_of(self, order: BlendOrder) -> type[RequestBlend]:
        """Return the class that blends this order."""
        return RequestBlend

    def blend(self, order: BlendOrder, pace: Pace) -> Sliced:
        """Compute and write the KV of one prompt. Returns the report that travels back with the request's
        output."""
        opened = self._opened(order.recipe.store)
        wanted = [key for key, _, _ in order.recipe.spans]
        yield from beside(self._loader.thread, pace, lambda: opened.prefetcher.arrived(wanted))
        order, exact = self.prefixes.put_head(order)
        request = self.blend_of(order)
        window = self.compression.window(order)
        note = None if window is None else window.note
        told = opened.estimate, pace, note, self._choices
        blend = request(self.model, self._loader, opened.kv, order, *told)
        report = yield from blend.run()
        if exact is not None:
            report = behind(exact, report)
        if window is not None:  # until the blend says otherwise
            report = report.evicted(Eviction(whole="the answer ended with its first tokens"))
        self._keep(order.ticket, report)
        return report

    def evict(self, order: EvictionOrder) -> Eviction:
        """Evict a blended prompt's KV (:meth:`Compression.evict`)."""
        eviction = self.compression.evict(order)
        if order.ticket in self._reports:
            self._reports[order.ticket] = self._reports[order.ticket].evicted(eviction)
        return eviction

    def load(self, order: NodeLoad) -> BlendReport | None:
        """Restore an exact prefix (:meth:`ExactPrefixes.load`)."""
        report = self.prefixes.load(order)
        if report is not None:
            self._keep(order.ticket, report)
        return report

    def open_tree(self, root: str, identity: dict[str, Any], stack: Sequence[dict[str, Any]]) -> str:
        """Open the tree in folder ``root``, and return its id. Raises StoreError where several engines would
        write."""
        if not self._owner:
            raise StoreError("data parallel engines cannot share a tree")
        return self.prefixes.open(root, identity, stack)

    def _keep(self, ticket: str, report: BlendReport) -> None:
        self._reports[ticket] = report
        if len(self._reports) > _KEPT_REPORTS:
            self._reports.popitem(last=False)

    def report(self, ticket: str) -> BlendReport | None:
        """Return the report of a request whose output left without one: only the client knew where to stop,
        or the output is a server's stream."""
        return self._reports.get(ticket)


def _timed(work: Generator[None, None, T]) -> Generator[None, None, tuple[float, T]]:
    """Run the work. Returns the seconds that it took, without pauses, and its result."""
    seconds = 0.0
    while True:
        begin = time.perf_counter()
        try:
            next(work)
        except StopIteration as end:
            return seconds + time.perf_counter() - begin, end.value
        seconds += time.perf_counter() - begin
        yield


def _stored(opened: _OpenStore) -> KVStore:
    """Return the store, which only the owner has."""
    assert isinstance(opened.kv, KVStore)
    return opened.kv


# Operations that a client may call by name, with plain data. Arguments: see :class:`StoreClient`.
OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "open_store": DataPlane.open_store,
    "close_store": DataPlane.close_store,
    "ingest": DataPlane.ingest,
    "flush": DataPlane.flush,
    "prefetch": DataPlane.prefetch,
    "delete": DataPlane.delete,
    "check": DataPlane.check,
    "empty_ram": DataPlane.empty_ram,
    "forecast": DataPlane.forecast,
    "stats": DataPlane.stats,
    "report": DataPlane.report,
    "open_tree": DataPlane.open_tree,
    "close_tree": lambda plane, *args: plane.prefixes.close_tree(*args),
    "delete_nodes": lambda plane, *args: plane.prefixes.delete(*args),
    "tree_stats": lambda plane, *args: plane.prefixes.stats(*args),
}
