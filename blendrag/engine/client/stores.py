"""A store in the engine's worker, as all code outside the engine uses it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blendrag.control.profile import Profile
from blendrag.engine.client.running import RunningEngine
from blendrag.engine.wire.operations import Deleted, Ingested, StoreStats
from blendrag.store.contexts import Chunk
from blendrag.store.identity import KVIdentity
from blendrag.store.stack import TierSpec
from blendrag.store.tiers.local import Forecast


@dataclass(frozen=True, slots=True)
class StoreClient:
    """A client of one store in the engine's worker, made by :meth:`open`. ``id`` names the store in recipes.

    Methods wait for the worker, between two of the engine's steps, and raise what it raised there
    (StoreError, StoreFullError); EngineError if the worker does not answer in time.
    """

    engine: RunningEngine
    id: str

    @classmethod
    def open(
        cls,
        engine: RunningEngine,
        root: Path,
        identity: KVIdentity,
        stack: Iterable[TierSpec],
        prefix: Sequence[int] = (),
        profile: Profile | None = None,
        *,
        lock: bool = False,
    ) -> StoreClient:
        """Open the store in folder ``root``; opening it again gives the same one.

        prefix: token ids behind which chunks are prefilled, named by ``identity.prefix``. profile: with it,
        chunks are loaded only where that is faster than computing them (decision D13). lock: have the worker
        hold the folder's lock. Raises StoreInUseError then.
        """
        holds = os.getpid() if lock else 0  # the process that the lock is held for
        measured = profile and profile.model_dump(mode="json")
        tiers = [spec.plain() for spec in stack]
        opened = engine.call("open_store", str(root), asdict(identity), tiers, list(prefix), measured, holds)
        return cls(engine, opened)

    def close(self) -> None:
        """Wait for what is being written, and forget what is in RAM."""
        self._call("close_store")

    def ingest(self, chunks: Iterable[Chunk]) -> Ingested:
        """Prefill chunks, except those that a shared tier has. They are written while the next call computes.
        Raises the error of an earlier write."""
        return Ingested(**self._call("ingest", _plain(chunks)))

    def flush(self) -> int:
        """Wait for all writes. Returns the bytes written since the last ingest or flush."""
        return self._call("flush")

    def ingest_later(self, chunks: Iterable[Chunk]) -> Future[Any]:
        """Do :meth:`ingest` and :meth:`flush` without waiting. An error is raised by the next ingest."""
        return self.engine.calls_later(("ingest", self.id, _plain(chunks)), ("flush", self.id))

    def prefetch(self, keys: Iterable[str]) -> Future[Any]:
        """Have the worker begin to read chunks into memory. Returns at once."""
        return self.engine.call_later("prefetch", self.id, list(keys))

    def delete(self, keys: Iterable[str], *, everywhere: bool = False) -> Deleted:
        """Drop chunks from all tiers; with ``everywhere``, drop nothing unless all tiers can be reached."""
        found = self._call("delete", list(keys), everywhere)
        return Deleted(found["chunks"], tuple(found["unreachable"]))

    def check_later(self, chunks: Iterable[Chunk]) -> Future[Any]:
        """Have the owner check chunks that another engine could not use, and ingest those that no tier has,
        as :meth:`ingest_later` does."""
        return self.engine.calls_later(("check", self.id, _plain(chunks)), ("flush", self.id))

    def empty_ram(self) -> None:
        """Have the RAM tier drop what a tier below it has, too."""
        self._call("empty_ram")

    def forecast(self, forecasts: Iterable[Forecast]) -> None:
        """Tell the eviction policies how likely it is that conversations go on."""
        self._call("forecast", list(forecasts))

    def stats(self) -> StoreStats:
        return StoreStats(**self._call("stats"))

    def _call(self, operation: str, *args: Any) -> Any:
        return self.engine.call(operation, self.id, *args)


def _plain(chunks: Iterable[Chunk]) -> list[tuple[str, list[int], list[int], str]]:
    return [(chunk.key, list(chunk.token_ids), list(chunk.context), chunk.after) for chunk in chunks]
