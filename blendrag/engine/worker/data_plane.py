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
from blendrag.engine.client.watchdog import ENDS_WITHIN_S
from blendrag.engine.operations import Deleted, Ingested, StoreStats
from blendrag.engine.recipe import BlendOrder
from blendrag.engine.report import BlendReport
from blendrag.engine.worker.blending import LoadedModel, RequestBlend
from blendrag.engine.worker.chunk_prefill import ChunkPrefill, ChunkTokens
from blendrag.engine.worker.jobs import Jobs
from blendrag.engine.worker.slices import BlendQueue, Pace, Sliced, StepClock, beside, exhaust
from blendrag.errors import StoreError
from blendrag.eviction.hazard_file import load_hazard
from blendrag.load.loader import LayerLoader
from blendrag.load.prefetch import Prefetcher
from blendrag.store.contexts import Ids
from blendrag.store.identity import KVIdentity, context_name, prefix_name
from blendrag.store.kv_store import KVStore
from blendrag.store.lock import IndexLock
from blendrag.store.tiers import Tier, TierSpec
from blendrag.store.tiers.local import Forecast

_KEPT_REPORTS = 256
_LOOK_S = 0.002  # how often it is looked whether another thread is done

T = TypeVar("T")


@dataclass(slots=True)
class _OpenStore:
    kv: KVStore
    prefetcher: Prefetcher
    estimate: Estimator | None
    prefill: ChunkPrefill
    lock: IndexLock | None
    writes: list[Future[int]] = field(default_factory=list)


class DataPlane:
    """Bound to one loaded model. Methods run on the worker's own thread, between or inside engine steps."""

    def __init__(self, model: LoadedModel, layers_in_flight: int = 8, share: float = 1.0) -> None:
        self.model = model
        self.clock = StepClock()
        self.jobs = Jobs(self.clock, share)
        self._loader = LayerLoader(layers_in_flight)
        self._stores: dict[str, _OpenStore] = {}
        self._reports: OrderedDict[str, BlendReport] = OrderedDict()
        self._forecasts: dict[str, float] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="blendrag-writer")
        self.queue = BlendQueue(self.blend)

    # -- stores -------------------------------------------------------------------------------------------

    def open_store(
        self,
        root: str,
        identity: dict[str, Any],
        stack: Sequence[dict[str, Any]],
        prefix: Sequence[int] = (),
        profile: dict[str, Any] | None = None,
        lock: bool = False,
    ) -> str:
        """Open the store in folder ``root``; its id. Arguments as :meth:`StoreClient.open` sends them."""
        kind = KVIdentity(**identity)
        named = prefix_name(kind.prefix_kind, prefix)
        assert named == kind.prefix, "chunks would be stored under another prefix's name"
        if root not in self._stores:
            dtype = str(self.model.decoder.dtype).removeprefix("torch.")
            with ExitStack() as failed:
                held = IndexLock(Path(root), ENDS_WITHIN_S) if lock else None
                if held:
                    failed.callback(held.release)
                kv = KVStore.open(Path(root), kind, dtype, [TierSpec.model_validate(spec) for spec in stack])
                estimate = Estimator.of(Profile.model_validate(profile)) if profile else None
                prefill = ChunkPrefill(self.model.decoder, self.model.cache, tuple(prefix))
                self._stores[root] = _OpenStore(kv, Prefetcher(kv), estimate, prefill, held)
                failed.pop_all()
        return root

    def close_store(self, store: str) -> None:
        opened = self._stores.pop(store, None)
        if opened:
            self.queue.stop(store)
            opened.prefetcher.close()
            self._loader.drain()
            try:
                exhaust(_drained(opened))
                self._writer.submit(lambda: None).result()  # what else was begun there has ended
            finally:
                opened.kv.close()
                if opened.lock:
                    opened.lock.release()

    def close(self) -> None:
        """Close all stores. Raises what one of them did once all are closed."""
        with ExitStack() as stack:
            for store in tuple(self._stores):
                stack.callback(self.close_store, store)

    def store(self, store: str) -> KVStore:
        return self._stores[store].kv

    @property
    def tiers(self) -> list[Tier]:
        """Those of all open stores."""
        return [tier for opened in self._stores.values() for tier in opened.kv.tiers]

    def prefetch(self, store: str, keys: Sequence[str]) -> None:
        """Begin to read chunks into memory, beside the engine's steps. Returns at once."""
        self._stores[store].prefetcher.begin(keys)

    def delete(
        self, store: str, keys: Sequence[str], everywhere: bool = False
    ) -> Generator[bool, None, Deleted]:
        opened = self._stores[store]
        opened.prefill.forget()
        delete = partial(opened.kv.delete, keys, everywhere=everywhere)
        chunks, unreachable = yield from _awaited(self._writer.submit(delete))
        return Deleted(chunks, tuple(unreachable))

    def empty_ram(self, store: str) -> None:
        self.store(store).empty_ram()

    def forecast(self, store: str, forecasts: Sequence[Forecast]) -> None:
        """For the store's policies now, for vLLM's prefix cache with :meth:`take_forecasts`."""
        self.store(store).forecast(forecasts)
        self._forecasts |= {conversation: chance for conversation, chance, _ in forecasts}

    def take_forecasts(self) -> dict[str, float]:
        """The chance that conversations go on, as told since the last call."""
        taken, self._forecasts = self._forecasts, {}
        return taken

    def use_policy(self, store: str, name: str) -> None:
        self.store(store).use_policy(name)

    def learn(self, store: str, folder: str) -> None:
        self.store(store).learn(load_hazard(Path(folder))[0])

    def stats(self, store: str) -> StoreStats:
        opened = self._stores[store]
        return StoreStats(opened.kv.stats(), opened.prefetcher.stats(), opened.kv.policy_stats())

    # -- ingest -------------------------------------------------------------------------------------------

    def ingest(
        self, store: str, chunks: Sequence[tuple[str, Ids, Ids, str]]
    ) -> Generator[bool | None, None, Ingested]:
        """Prefill (key, token ids, context, after), but for those that a shared tier has; they are written
        while the next call computes. Raises what an earlier write did."""
        opened = self._stores[store]
        adopt = partial(opened.kv.adopt, [(key, ids) for key, ids, *_ in chunks])
        adopted = yield from _awaited(self._writer.submit(adopt))
        fresh = [
            ChunkTokens(key, tuple(ids), tuple(context), after)
            for key, ids, context, after in chunks
            if key not in adopted
        ]
        seconds, tensors = (yield from _timed(opened.prefill.run(fresh))) if fresh else (0.0, [])
        written = yield from _drained(opened)
        if self._stores.get(store) is not opened:
            raise StoreError("the store was closed while chunks were prefilled for it: ingest again")
        for chunk, kv in zip(fresh, tensors, strict=True):
            name = context_name(chunk.context, chunk.after)
            write = self._writer.submit(opened.kv.put, chunk.key, chunk.token_ids, kv, name)
            opened.writes.append(write)
        return Ingested(
            tokens=sum(len(chunk.token_ids) for chunk in fresh),
            adopted=sum(len(ids) for key, ids, *_ in chunks if key in adopted),
            seconds=seconds,
            nbytes=written,
        )

    def flush(self, store: str) -> Generator[bool, None, int]:
        """Wait for all writes; bytes written since the last call."""
        return (yield from _drained(self._stores[store]))

    # -- requests -----------------------------------------------------------------------------------------

    def wait_for_device(self) -> None:
        """Until what this thread has launched on it is done."""
        device = self.model.cache.device
        if device.type != "cpu":
            torch.accelerator.current_stream(device).synchronize()

    def blend_of(self, order: BlendOrder) -> type[RequestBlend]:
        """How it is blended."""
        return RequestBlend

    def blend(self, order: BlendOrder, pace: Pace) -> Sliced:
        """Compute and write the KV of one prompt; the report that travels back with the request's output."""
        opened = self._stores[order.recipe.store]
        wanted = [key for key, _, _ in order.recipe.spans]
        yield from beside(self._loader.thread, pace, lambda: opened.prefetcher.arrived(wanted))
        request = self.blend_of(order)
        blend = request(self.model, self._loader, opened.kv, order, opened.estimate, pace)
        report = yield from blend.run()
        self._reports[order.ticket] = report
        if len(self._reports) > _KEPT_REPORTS:
            self._reports.popitem(last=False)
        return report

    def report(self, ticket: str) -> BlendReport | None:
        """The report of a request that ended in the step that blended it: its output left without one."""
        return self._reports.get(ticket)


def _timed(work: Generator[None, None, T]) -> Generator[None, None, tuple[float, T]]:
    """Also the seconds that it took, without pauses."""
    seconds = 0.0
    while True:
        begin = time.perf_counter()
        try:
            next(work)
        except StopIteration as end:
            return seconds + time.perf_counter() - begin, end.value
        seconds += time.perf_counter() - begin
        yield


def _drained(opened: _OpenStore) -> Generator[bool, None, int]:
    """Wait for all writes that were begun: their bytes. Raises the first one's error once all have ended."""
    writes = tuple(opened.writes)
    while wait(writes, timeout=_LOOK_S).not_done:
        yield True
    counted = [write for write in writes if write in opened.writes]  # else somebody else waited for it, too
    opened.writes = [write for write in opened.writes if write not in writes]
    return sum(write.result() for write in counted)


def _awaited(work: Future[T]) -> Generator[bool, None, T]:
    """Another thread's work, waited for between the engine's steps."""
    while wait([work], timeout=_LOOK_S).not_done:
        yield True
    return work.result()


# What a client may ask for by name, with plain data. Arguments: see :class:`StoreClient`.
OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "open_store": DataPlane.open_store,
    "close_store": DataPlane.close_store,
    "ingest": DataPlane.ingest,
    "flush": DataPlane.flush,
    "prefetch": DataPlane.prefetch,
    "delete": DataPlane.delete,
    "empty_ram": DataPlane.empty_ram,
    "forecast": DataPlane.forecast,
    "use_policy": DataPlane.use_policy,
    "learn": DataPlane.learn,
    "stats": DataPlane.stats,
    "report": DataPlane.report,
}
