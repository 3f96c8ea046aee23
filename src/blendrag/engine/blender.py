"""The data plane inside a worker: stores, ingest prefill, and fused prefill of requests."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from blendrag.engine.alone import AlonePrefill
from blendrag.engine.decoder import Decoder
from blendrag.engine.fused import CachedSpan, FusedPrefill, Target
from blendrag.engine.masks import Mask
from blendrag.engine.recipe import BlendOrder
from blendrag.fuse import make_selector
from blendrag.store.chunk import Chunk, Miss
from blendrag.store.identity import KVIdentity
from blendrag.store.kv_store import KVStore

_KEPT_REPORTS = 256


@dataclass(slots=True)
class _OpenStore:
    kv: KVStore
    writes: list[Future[int]] = field(default_factory=list)
    reads: list[Future[None]] = field(default_factory=list)


class Blender:
    """Bound to one loaded model. Methods run on the worker's own thread, between or inside engine steps."""

    def __init__(self, decoder: Decoder, runner: Any, block_size: int, mask: Mask = "runs") -> None:
        self.decoder, self.runner, self.block_size, self.mask = decoder, runner, block_size, mask
        self._alone = AlonePrefill(decoder, runner, block_size)
        self._stores: dict[str, _OpenStore] = {}
        self._reports: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="blendrag-writer")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="blendrag-reader")

    # -- stores -------------------------------------------------------------------------------------------

    def open_store(self, root: str, identity: KVIdentity, ram_bytes: int, disk_bytes: int | None) -> str:
        """Open the store in folder ``root``; its id. Opening it again gives the same one."""
        if root not in self._stores:
            kv = KVStore.open(Path(root), identity, ram_bytes=ram_bytes, disk_bytes=disk_bytes)
            self._stores[root] = _OpenStore(kv)
        return root

    def close_store(self, store: str) -> None:
        opened = self._stores.pop(store, None)
        if opened:
            for read in opened.reads:
                read.cancel()
            wait(opened.reads)
            self._drain(opened)
            opened.kv.close()

    def store(self, store: str) -> KVStore:
        return self._stores[store].kv

    def prefetch(self, store: str, keys: Sequence[str]) -> None:
        """Begin to read chunks into memory, beside the engine's steps. Returns at once."""
        opened = self._stores[store]
        opened.reads = [read for read in opened.reads if not read.done()]
        opened.reads.append(self._reader.submit(opened.kv.prefetch, keys))

    # -- ingest -------------------------------------------------------------------------------------------

    def ingest(self, store: str, chunks: Sequence[tuple[str, Sequence[int]]]) -> dict[str, Any]:
        """Prefill chunks alone; they are written while the next call computes. Raises what an earlier
        write did.

        Returns tokens and seconds of prefill, and the bytes that were written since the last call.
        """
        opened = self._stores[store]
        written = self._drain(opened)
        begin = time.perf_counter()
        tensors = self._alone.run([ids for _, ids in chunks])
        seconds = time.perf_counter() - begin
        for (key, ids), kv in zip(chunks, tensors, strict=True):
            opened.writes.append(self._writer.submit(opened.kv.put, Chunk(key, tuple(ids), kv)))
        return {"tokens": sum(len(ids) for _, ids in chunks), "seconds": seconds, "bytes": written}

    def flush(self, store: str) -> int:
        """Wait for all writes; bytes written since the last call."""
        return self._drain(self._stores[store])

    @staticmethod
    def _drain(opened: _OpenStore) -> int:
        writes, opened.writes = opened.writes, []
        wait(writes)  # all of them, before the first one's error is raised
        return sum(write.result() for write in writes)

    # -- requests -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def blend(self, order: BlendOrder) -> dict[str, Any]:
        """Compute and write the KV of one prompt; the report that travels back with the request's output."""
        begin = time.perf_counter()
        recipe = order.recipe
        kv = self._stores[recipe.store].kv
        spans, missing = [], {}
        for key, start, length in recipe.spans:
            length = min(length, len(order.token_ids) - start)  # the prompt's last token is the engine's
            found = kv.get(key, order.token_ids[start : start + length])
            if isinstance(found, Miss):
                missing[key] = found.reason
            else:
                spans.append(CachedSpan(start, length, found.kv))
        loaded = time.perf_counter()
        device = self.decoder.attentions[0].kv_cache.device
        stats = FusedPrefill(
            self.decoder,
            self.runner,
            torch.tensor(order.token_ids, device=device),
            spans,
            make_selector(recipe.selector, recipe.options),
            Target(torch.tensor(order.block_ids, device=device), self.block_size, order.written),
            self.mask,
        ).run()
        report = {
            "cached": stats.cached,
            "fresh": stats.fresh,
            "recomputed": stats.recomputed,
            "missing": missing,
            "ms": {
                "load": 1e3 * (loaded - begin + stats.load_s),
                "select": 1e3 * stats.select_s,
                "recompute": 1e3 * stats.recompute_s,
            },
        }
        self._reports[order.ticket] = report
        if len(self._reports) > _KEPT_REPORTS:
            self._reports.popitem(last=False)
        return report

    def report(self, ticket: str) -> dict[str, Any] | None:
        """The report of a request that ended in the step that blended it: its output left without one."""
        return self._reports.get(ticket)
