"""Trees of exact prefixes: settings of indexes that keep them, and what holds of each that is stored."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from blendrag.store.identity import KVIdentity
from blendrag.store.record import Head
from blendrag.store.stack import TierSpec
from blendrag.store.tiers import Opened, Tier
from blendrag.tree.layout import NodeBlocks
from blendrag.tree.path import placed
from blendrag.tree.store import NodeStore
from blendrag.tree.tree import Tree
from stores import IDENTITY

DOCUMENTS = {
    name: tuple(range(at, at + length)) for name, at, length in (("a", 10, 3), ("b", 20, 6), ("c", 30, 9))
}
ROOT = (1, 2)

Prompt = tuple[tuple[int, ...], list[tuple[str, int, int]]]


def prompt(names: Sequence[str], root: tuple[int, ...] = ROOT) -> Prompt:
    """Tokens, and where in them each of these documents stands."""
    ids, documents = root, []
    for name in names:
        documents.append((name, len(ids), len(DOCUMENTS[name])))
        ids += (*DOCUMENTS[name], 5)
    return (*ids, 99), documents


@dataclass
class TreeRig:
    """Both halves of a tree over one folder. rows: what was put, by key."""

    root: Path
    stack: Sequence[TierSpec]
    identity: KVIdentity = IDENTITY
    rows: dict[str, torch.Tensor] = field(default_factory=dict)
    kind: ClassVar[type[Tree]] = Tree
    sizes: ClassVar[NodeBlocks] = NodeBlocks(tokens=4, nbytes=32)

    def __post_init__(self) -> None:
        self.tree, self.emptied = self.kind.open(self.root, self.identity)
        self.store = NodeStore.open(self.root, self.identity, "bfloat16", self.stack, self.sizes)

    @classmethod
    @contextmanager
    def opened(
        cls, *stack: TierSpec, root: Path | None = None, identity: KVIdentity = IDENTITY
    ) -> Iterator[Self]:
        """In RAM, if no tiers are given."""
        with tempfile.TemporaryDirectory() as folder:
            rig = cls(root or Path(folder), stack or (TierSpec(kind="ram", bytes=1 << 20),), identity)
            try:
                yield rig
            finally:
                rig.store.close()
                rig.tree.close()

    def some_rows(self, start: int, end: int) -> torch.Tensor:
        """Those that a node with these tokens may have."""
        return torch.randint(
            256, (2, len(self.store.layout.blocks(start, end)) * self.sizes.nbytes), dtype=torch.uint8
        )


def tree_tiers(ram: int = 0, disk: int = 0) -> list[dict[str, Any]]:
    """Return the default tiers, with so many bytes for exact prefixes in them."""
    return [
        {"kind": "ram", "bytes": 2 << 30, "tree_bytes": ram},
        {"kind": "disk", "tree_bytes": disk},
    ]


def check_tree(store: NodeStore) -> None:
    """In each tier, the parent of each node is there, and ends where the node begins, with its tokens."""
    for tier in store.kv.tiers:
        heads = {key: head for key in list(store._parents) if (head := _head(tier, key))}
        for key, head in heads.items():
            start, parent = placed(head.context)
            assert store.layout.key_of(head.ids, head.context) == key
            assert store._parents[key] == parent
            if parent:
                assert parent in heads, f"{key} is in {tier.name} without its parent"
                assert heads[parent].tokens == start and head.starts_with(heads[parent].ids.tolist())


def _head(tier: Tier, key: str) -> Head | None:
    opened = tier.open([key]).get(key)
    if not isinstance(opened, Opened):
        return None
    tier.close_record(opened)
    return opened.head
