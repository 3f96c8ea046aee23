"""The stores that are open in a worker, and what a client asks of them besides ingest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blendrag.control.estimate import Estimator
from blendrag.control.profile import Profile
from blendrag.engine.client.watchdog import ENDS_WITHIN_S
from blendrag.engine.forward.ranks import Ranks, open_on_all
from blendrag.engine.wire.operations import StoreStats
from blendrag.errors import ConfigError, StoreError
from blendrag.load.prefetch import Prefetcher
from blendrag.store.contexts import Ids
from blendrag.store.identity import KVIdentity, prefix_name
from blendrag.store.kv_reader import KVReader
from blendrag.store.kv_store import KVStore
from blendrag.store.tiers import Tier, TierSpec


@dataclass(frozen=True, slots=True)
class OpenStore:
    """An open store. prefix: the tokens that all its chunks stand behind."""

    kv: KVReader
    prefetcher: Prefetcher
    estimate: Estimator | None
    prefix: Ids


class Stores:
    """The open stores of one loaded model. owner: whether this engine stores; of data parallel engines the
    first one does, and all read. closing: is told of a store before it closes."""

    def __init__(self, ranks: Ranks, dtype: str, owner: bool, closing: Callable[[str], None]) -> None:
        self._ranks, self._dtype, self._owner, self._closing = ranks, dtype, owner, closing
        self._stores: dict[str, OpenStore] = {}

    @property
    def operations(self) -> Mapping[str, Callable[..., Any]]:
        """Return what a client may call. Arguments: see :class:`StoreClient`."""
        return {
            "open_store": self.open,
            "close_store": self.close,
            "prefetch": lambda store, keys: self.get(store).prefetcher.begin(keys),
            "empty_ram": lambda store: self.get(store).kv.empty_ram(),
            "forecast": lambda store, forecasts: self.get(store).kv.policies.forecast(forecasts),
            "stats": self.stats,
        }

    def open(
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
            kv = self._open_kv(Path(root), kind, specs, lock)
            self._stores[root] = OpenStore(kv, Prefetcher(kv), estimate, tuple(prefix))
        return root

    def _open_kv(self, root: Path, kind: KVIdentity, stack: Sequence[TierSpec], lock: int) -> KVReader:
        ranks, heads, dtype = self._ranks, kind.num_kv_heads, self._dtype
        own, shards = ranks.heads(heads), ranks.shards(heads)
        stack = [spec.share(1 / ranks.size) for spec in stack] if ranks.size > 1 else stack
        if not self._owner and all(spec.kind == "ram" for spec in stack):
            raise ConfigError("data parallel engines cannot share KV by RAM alone: add a tier below it")
        holds = (ENDS_WITHIN_S if lock else None, lock)

        def begin() -> KVReader:
            if self._owner and ranks.first:
                return KVStore.open(root, kind, dtype, stack, own, shards, *holds)
            return KVReader.open(root, kind, dtype, stack, own, shards)

        return open_on_all(ranks, begin)

    def get(self, store: str) -> OpenStore:
        if store not in self._stores:
            raise StoreError(f"the store {store!r} is not open in the engine")
        return self._stores[store]

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._stores))

    def close(self, store: str) -> None:
        opened = self._stores.pop(store, None)
        if opened:
            opened.prefetcher.close()
            try:
                self._closing(store)
            finally:
                opened.kv.close()

    @property
    def tiers(self) -> list[Tier]:
        return [tier for opened in self._stores.values() for tier in opened.kv.tiers]

    def stats(self, store: str) -> StoreStats:
        opened = self.get(store)
        return StoreStats(opened.kv.stats(), opened.prefetcher.stats(), opened.kv.policies.stats())
