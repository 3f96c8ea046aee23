"""A tree of exact prefixes in the engine's worker, as all code outside the engine uses it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blendrag.engine.client.running import RunningEngine
from blendrag.engine.wire.prefixes import PrefixPath
from blendrag.store.identity import KVIdentity
from blendrag.store.stack import TierSpec
from blendrag.tree.tree import Next


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

    def growing(self, coming: Next, *, stored: bool = True) -> PrefixPath:
        """Return the path of a request that nobody has asked, for what comes next of a path: up to its end,
        where it is stored, or to some token before."""
        before = len(coming.named) - 1
        kept, state = (before + 1, coming.kept_state) if stored else (before, "")
        return PrefixPath(
            self.id, coming.named[:kept], before, kept, grows=True, state=coming.state, kept_state=state
        )

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
        return self.engine.call("tree_stats", self.id)
