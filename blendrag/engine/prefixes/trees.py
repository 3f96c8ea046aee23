"""A tree of exact prefixes in the engine's worker, as all code outside the engine uses it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blendrag.engine.client.running import RunningEngine
from blendrag.store.identity import KVIdentity
from blendrag.store.stack import TierSpec


@dataclass(frozen=True, slots=True)
class TreeClient:
    """A client of one tree in the engine's worker, made by :meth:`open`. ``id`` names the tree in a
    :class:`PrefixPath`. Methods wait and raise as :class:`StoreClient`'s do."""

    engine: RunningEngine
    id: str

    @classmethod
    def open(
        cls, engine: RunningEngine, root: Path, identity: KVIdentity, stack: Iterable[TierSpec]
    ) -> TreeClient:
        """Open the tree in folder ``root``; opening it again gives the same one."""
        tiers = [spec.plain() for spec in stack]
        return cls(engine, engine.call("open_tree", str(root), asdict(identity), tiers))

    def close(self) -> None:
        """Wait for what is being stored, and drop what is in RAM."""
        self.engine.call("close_tree", self.id)

    def delete(self, keys: Sequence[str]) -> None:
        """Drop nodes from all tiers, even while they are being stored."""
        self.engine.call("delete_nodes", self.id, list(keys))

    def delete_later(self, keys: Sequence[str]) -> Future[Any]:
        """Do as :meth:`delete`, without waiting."""
        return self.engine.call_later("delete_nodes", self.id, list(keys))

    def stats(self) -> dict[str, dict[str, int]]:
        """Return counters by tier."""
        found: dict[str, dict[str, int]] = self.engine.call("tree_stats", self.id)
        return found
