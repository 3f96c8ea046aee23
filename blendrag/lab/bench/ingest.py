"""A store for the time of a measurement, and what filling it costs next to plain prefill."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blendrag.engine.client.engine import Engine
from blendrag.engine.client.generation import Sampling
from blendrag.engine.client.stores import StoreClient
from blendrag.errors import BlendragError
from blendrag.lab.arms import reset
from blendrag.lab.progress import BenchProgress
from blendrag.lab.prompts import StoredChunk
from blendrag.serving.identity import kv_identity, prefix_ids
from blendrag.serving.prefill import batches
from blendrag.settings import Settings
from blendrag.store.catalogue import Catalogue

_ONE_TOKEN = Sampling(max_tokens=1)
_CALLS_PER_ROUND = 3  # as in a real ingest, a call's records are written while the next call computes


@dataclass(slots=True)
class IngestCost:
    """Tokens and seconds of ingest and of plain prefill of the same chunks.

    seconds: until everything was on disk; prefill_s: of these, what the model computed.
    """

    tokens: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    prefill_s: float = 0.0
    plain_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "bytes": self.nbytes,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens / self.seconds,
            "prefill_tokens_per_s": self.tokens / self.prefill_s,
            "plain_tokens_per_s": self.tokens / self.plain_s,
            "ratio_to_plain": self.plain_s / self.seconds,
        }


@dataclass(frozen=True, slots=True)
class TemporaryStore:
    store: StoreClient
    chunks: tuple[StoredChunk, ...]

    @property
    def id(self) -> str:
        """For recipes."""
        return self.store.id


@contextlib.contextmanager
def temporary_store(
    engine: Engine, settings: Settings, pieces: Sequence[tuple[int, ...]]
) -> Iterator[TemporaryStore]:
    """A store that knows ``pieces``, empty yet; gone afterwards, whatever happens."""
    prefix = prefix_ids(settings, engine.model_path)
    identity = kv_identity(settings, engine.model_path, prefix)
    chunks = tuple(StoredChunk(identity.chunk_key(ids), ids) for ids in pieces)
    with tempfile.TemporaryDirectory(prefix="blendrag-bench-", ignore_cleanup_errors=True) as folder:
        with contextlib.closing(Catalogue.open(Path(folder), identity)) as catalogue:
            catalogue.register("bench", [(chunk.key, "", chunk.token_ids) for chunk in chunks])
        store = StoreClient.open(engine, Path(folder), identity, settings.local_stack, prefix)
        try:
            yield TemporaryStore(store, chunks)
        finally:
            with contextlib.suppress(BlendragError):  # the engine may be what failed
                store.close()


def rounds_of(chunks: Sequence[StoredChunk], batch_tokens: int) -> list[list[list[StoredChunk]]]:
    """Chunks (all of one length) in batches of at most ``batch_tokens``, batches in rounds."""
    size = max(1, batch_tokens // len(chunks[0].token_ids))
    calls = [list(chunks[at : at + size]) for at in range(0, len(chunks), size)]
    return [calls[at : at + _CALLS_PER_ROUND] for at in range(0, len(calls), _CALLS_PER_ROUND)]


def ingest_all(
    store: StoreClient, chunks: Iterable[StoredChunk], batch_tokens: int, prefix_tokens: int = 0
) -> None:
    """Prefill and store chunks, batched as in a real ingest; on disk when it returns.

    Raises StoreFullError, EngineError.
    """
    for batch in batches(chunks, batch_tokens, prefix_tokens):
        store.ingest(batch)
    store.flush()


def fill(
    engine: Engine, store: TemporaryStore, rounds: Sequence[list[list[StoredChunk]]], progress: BenchProgress
) -> IngestCost:
    """Ingest all rounds, each next to plain prefill of the same chunks; which is first takes turns.

    A round ends when its records are on disk, so that no writing slows the plain prefill after it.
    """
    warm_up = rounds[0][0]
    store.store.ingest(replace(chunk, key=f"warm-up {chunk.key}") for chunk in warm_up)
    store.store.flush()  # nothing: the catalogue does not know these keys
    _prefill_plainly(engine, warm_up)
    cost = IngestCost()
    for number, calls in enumerate(rounds):
        steps = [_ingest_round, _plain_round]
        for step in steps if number % 2 == 0 else reversed(steps):
            progress.note("ingest" if step is _ingest_round else "plain prefill of the same")
            step(store.store, calls, cost)
            progress.step()
    return cost


def _ingest_round(store: StoreClient, calls: list[list[StoredChunk]], cost: IngestCost) -> None:
    begin = time.perf_counter()
    for batch in calls:
        done = store.ingest(batch)
        cost.tokens += done.tokens
        cost.prefill_s += done.seconds
        cost.nbytes += done.nbytes
    cost.nbytes += store.flush()
    cost.seconds += time.perf_counter() - begin


def _plain_round(store: StoreClient, calls: list[list[StoredChunk]], cost: IngestCost) -> None:
    reset(store.engine)
    begin = time.perf_counter()
    for batch in calls:
        _prefill_plainly(store.engine, batch)
    cost.plain_s += time.perf_counter() - begin


def _prefill_plainly(engine: Engine, batch: Sequence[StoredChunk]) -> None:
    async def all_at_once() -> None:
        await asyncio.gather(*(engine.agenerate(chunk.token_ids, _ONE_TOKEN) for chunk in batch))

    asyncio.run(all_at_once())
