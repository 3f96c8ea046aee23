"""The store of a tree's nodes. It is separate, so that nodes never push out a chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from blendrag.errors import StoreError
from blendrag.store.identity import KVIdentity
from blendrag.store.kv_reader import KVReader
from blendrag.store.kv_store import KVStore
from blendrag.store.record import DamagedError, Miss, Record
from blendrag.store.stack import TierSpec
from blendrag.store.tiers import Opened, Tier, TierError
from blendrag.tree.layout import NodeBlocks, NodeLayout
from blendrag.tree.tree import Tree


class NodeMissingError(Exception):
    """A node cannot be had: the message says why. ``damaged``: the tier and the key of a record that the
    first rank has to put aside, or to find missing. Never leaves the engine's worker."""

    def __init__(self, reason: str, damaged: tuple[str, str] | None = None) -> None:
        super().__init__(reason)
        self.damaged = damaged


@dataclass(frozen=True, slots=True)
class StoredNode:
    """A node and all of its prompt's token ids up to its end."""

    key: str
    parent: str
    start: int
    token_ids: Sequence[int]


class NodeStore:
    """The store of nodes, in the engine's worker. Thread-safe. Which nodes there may be is said by a
    :class:`Tree`, over the same folder. Of several ranks the first one stores, and the others read."""

    def __init__(self, kv: KVReader, layout: NodeLayout, parents: dict[str, str]) -> None:
        self.kv, self.layout, self._parents = kv, layout, parents

    @classmethod
    def open(
        cls,
        root: Path,
        identity: KVIdentity,
        dtype: str,
        stack: Sequence[TierSpec],
        sizes: NodeBlocks,
        rank: int = 0,
        ranks: int = 1,
    ) -> NodeStore:
        """Open or create the store; the other ranks' once the first one's is open. Raises the errors of
        :meth:`KVStore.open`."""
        layout, parents = NodeLayout(identity, dtype, sizes, rank, ranks), dict[str, str]()
        kv: KVReader
        if rank:
            kv = KVReader.open(root, identity, dtype, stack, layout=layout)
        else:
            tree, _ = Tree.open(root, identity)
            parents = tree.parents()
            tree.close()
            kv = KVStore.open(root, identity, dtype, stack, shards=ranks, layout=layout, parents=parents)
        for tier in kv.tiers:
            tier.name = f"tree {tier.name}"
        return cls(kv, layout, parents)

    def put(self, node: StoredNode, rows: torch.Tensor) -> bool:
        """Keep a node's blocks, uint8 [ranks * layers, bytes]. Returns False if nobody wants it (any more),
        or there is no room. A node that is there, as another prompt has computed it meanwhile, is not written
        again."""
        assert isinstance(self.kv, KVStore), "only the first rank stores"
        if self.kv.holds(node.key):
            return True
        known = node.key in self._parents
        self._parents[node.key] = node.parent
        record = self.layout.node(node.key, node.token_ids, node.start, node.parent, rows)
        try:
            kept = bool(self.kv.keep(record))
        except StoreError:
            kept = False
        if not kept and not known:
            self._parents.pop(node.key, None)
        return kept

    def load(
        self,
        nodes: Sequence[tuple[str, Sequence[int]]],
        *,
        use: bool = True,
        allow: Callable[[Sequence[Tier]], None] = lambda tiers: None,
    ) -> list[tuple[Record, Tier]]:
        """Return what this rank reads of the records of consecutive nodes of a path, verified, and the tiers
        they were in. nodes: (key, all token ids up to its end) of each. use: whether they count as used.
        allow: is told of the tiers before anything is read, and may raise. Raises NodeMissingError if one
        cannot be had."""
        opened = self.kv.open_records(nodes, use=use)
        records: list[tuple[Record, Tier]] = []
        try:
            if all(isinstance(one, Opened) for one in opened):
                allow([one.tier for one in opened if isinstance(one, Opened)])
            for one, (key, ids) in zip(opened, nodes, strict=True):
                if isinstance(one, Miss):
                    lost = one.reason in ("damaged", "missing")
                    at = (self.kv.tiers[-1].name, key) if lost else None
                    raise NodeMissingError(f"{key} is {one.reason}", at)
                if one.head.tokens != len(ids):
                    raise NodeMissingError(f"{key} has other tokens")
                try:
                    records.append((self.kv.read(one), one.tier))
                except DamagedError as error:
                    self.kv.damaged(one.tier.name, key)
                    raise NodeMissingError(str(error), (one.tier.name, key)) from None
                except TierError as error:
                    raise NodeMissingError(str(error)) from None
            if records:  # behind: the engine's step waits for this
                self.kv.replicas.promote_behind(*zip(*records, strict=True))
        finally:
            self.kv.close_records(opened)
        return records

    def delete(self, keys: Sequence[str]) -> None:
        """Drop nodes from all tiers. With each node, all that stand behind it have to be named, last ones
        first."""
        self.kv.delete(keys)
        for key in keys:
            self._parents.pop(key, None)

    def close(self) -> None:
        self.kv.close()
