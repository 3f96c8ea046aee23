"""Writers of a tree's nodes that are killed at random moments, and what is checked after each of them.

Run as a program (``python killed_nodes.py root rounds limit seed``), as killed.py is, with which it shares
how a writer is killed.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from itertools import permutations
from pathlib import Path

import torch

from blendrag.store.stack import TierSpec
from blendrag.tree import Nodes, path_of
from blendrag.tree.layout import NodeBlocks
from blendrag.tree.store import NodeStore, StoredNode
from blendrag.tree.tree import Tree
from killed import main
from stored_trees import check_tree
from stores import IDENTITY

BLOCK, BYTES = 4, 1 << 16
DOCUMENTS = {name: tuple(range(at, at + 6)) for at, name in zip((10, 20, 30, 40), "abcd", strict=True)}
ORDERS = ["".join(order) for order in permutations(DOCUMENTS, 3)]
LIMIT = 30 * 2 * 3 * BYTES  # of 64 nodes and their root, of up to three blocks in two layers each


def path(order: str) -> tuple[tuple[int, ...], Nodes]:
    """Token ids, and the nodes: a root and the documents."""
    ids: tuple[int, ...] = (1, 2)
    spans = []
    for name in order:
        spans.append((name, len(ids), len(DOCUMENTS[name])))
        ids += DOCUMENTS[name]
    return ids, path_of(IDENTITY, ids, spans)


def rows_of(key: str, blocks: int) -> torch.Tensor:
    """Those of a node, known by its name."""
    return torch.full((2, blocks * BYTES), int(key[:2], 16), dtype=torch.uint8)


def opened(root: Path, limit: int | None) -> tuple[Tree, NodeStore]:
    tree, emptied = Tree.open(root / "tree", IDENTITY)
    assert not emptied
    stack = [TierSpec(kind="ram", bytes=LIMIT // 3), TierSpec(kind="disk", bytes=limit)]
    return tree, NodeStore.open(root / "tree", IDENTITY, "bfloat16", stack, NodeBlocks(BLOCK, BYTES))


class Writer:
    """Grows paths and deletes documents until it is killed, and notes in ``root/log`` what is done."""

    def __init__(self, root: Path, limit: int | None, choice: random.Random) -> None:
        self._tree, self._store = opened(root, limit)
        self._log = os.open(root / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._choice = choice

    def step(self) -> None:
        if self._choice.random() < 0.15:
            name = self._choice.choice("abcd")
            self._note("unwanted", name)
            self._store.delete(self._tree.forget([name]))
            self._note("deleted", name)
            return
        order = self._choice.choice(ORDERS)
        ids, nodes = path(order)
        held = self._tree.match(nodes)
        for name in order[max(0, held - 1) :]:
            self._note("wanted", name)
        self._tree.expect(nodes[held:], ids)
        for at in range(held, len(nodes)):
            node = nodes[at]
            rows = rows_of(node.key, len(self._store.layout.blocks(node.start, node.end)))
            if self._store.put(StoredNode(node.key, node.parent, node.start, ids[: node.end]), rows):
                self._note("put", order[:at] or "-")

    def _note(self, what: str, about: str) -> None:
        os.write(self._log, f"{what} {about}\n".encode())


def check(root: Path, limit: int | None, counts: Counter[str]) -> None:
    """Raises AssertionError if opening does not find all that was acknowledged, or what is broken."""
    lines = (root / "log").read_text().split("\n")[:-1] if (root / "log").exists() else []
    acknowledged, deleted = set[str](), set[str]()
    for what, about in (line.split() for line in lines):
        if what == "put":
            acknowledged.add(about)
        elif what == "unwanted":
            acknowledged = {path for path in acknowledged if about not in path}
        (deleted.add if what == "deleted" else deleted.discard)(about)
    counts |= Counter(line.split()[0] for line in lines)
    counts["half-written"] += len(list(root.glob("tree/kv/tmp/*")))
    tree, store = opened(root, limit)
    assert not list(root.glob("tree/kv/tmp/*"))
    check_tree(store)
    for order in ORDERS:
        ids, nodes = path(order)
        held = tree.match(nodes)
        for record, _ in store.load([(node.key, ids[: node.end]) for node in nodes[:held]]):
            assert torch.equal(record.rows, rows_of(record.key, record.rows.shape[1] // BYTES))
        there = max((len(one) + 1 for one in acknowledged if order.startswith(one)), default=0)
        assert limit or held >= there, f"of {order}, {held} nodes are left of {there}"
        assert deleted.isdisjoint(order[: max(0, held - 1)])
    used = store.kv.tiers[-1].stats()["bytes"]
    assert limit is None or used <= limit
    store.close()
    tree.close()


if __name__ == "__main__":
    main(Writer, check, LIMIT)
