"""Exact prefixes as a user looks after them, without an engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from blendrag.files.lock import IndexLock
from blendrag.store.tiers import TierSpec
from blendrag.tree import path_of
from blendrag.tree.layout import NodeBlocks
from blendrag.tree.states import StateTree
from blendrag.tree.store import NodeStore, StoredNode
from blendrag.tree.tree import Tree
from stores import IDENTITY, A, B, register

Blendrag = Callable[..., Result]


@pytest.fixture
def index(workdir: Path) -> Path:
    """With one path of two documents in its tree, the second of which is not stored in another order."""
    root = workdir / "blendrag-index"
    register(root, [A, B])
    tree, _ = Tree.open(root / "tree", IDENTITY)
    store = NodeStore.open(
        root / "tree", IDENTITY, "bfloat16", [TierSpec(kind="disk", bytes=1 << 20)], NodeBlocks(4, 32)
    )
    ids = (7, *A.token_ids, *B.token_ids)
    nodes = path_of(
        IDENTITY, ids, [(A.key, 1, len(A.token_ids)), (B.key, 1 + len(A.token_ids), len(B.token_ids))]
    )
    tree.expect(nodes, ids)
    for node in nodes:
        rows = torch.zeros(2, 32 * len(store.layout.blocks(node.start, node.end)), dtype=torch.uint8)
        assert store.put(StoredNode(node.key, node.parent, node.start, ids[: node.end]), rows)
    tree.close()
    store.close()
    return root


def test_tree_is_drawn_with_its_documents(blendrag: Blendrag, index: Path) -> None:
    shown = blendrag("stats", "--tree")
    assert shown.exit_code == 0 and "3 nodes" in shown.stdout
    lines = [line for line in shown.stdout.splitlines() if "tokens" in line]
    assert [line.index(next(c for c in line if c.isdigit())) for line in lines] == [4, 8, 12]
    assert f"text {A.key}" in lines[1] and f"text {B.key}" in lines[2]
    rows = json.loads(blendrag("stats", "--tree", "--json").stdout)
    assert [(row["start"], row["end"], row["document"]) for row in rows] == [
        (0, 1, ""),
        (1, 9, A.key),
        (9, 17, B.key),
    ]


def test_state_behind_a_document_is_drawn_as_one(blendrag: Blendrag, index: Path) -> None:
    tree, _ = StateTree.open(index / "tree", IDENTITY)
    coming = tree.next(tree.path(B.token_ids, [(B.key, 0, 8)]), 0, B.token_ids)
    tree.expect(coming.new, B.token_ids)
    for node in coming.new:
        assert tree._catalogue.mark_ready(node.key, 1 << 20)
    tree.close()
    *_, kv, state = blendrag("stats", "--tree").stdout.splitlines()
    assert "8 tokens, 1.0 MiB" in kv and f"state, 1.0 MiB, used 0 times: text {B.key}" in state


def test_cleared_tree_is_gone(blendrag: Blendrag, index: Path) -> None:
    cleared = blendrag("gc", "--tree")
    assert cleared.exit_code == 0 and "exact prefixes: 0.0 MiB" not in cleared.stdout
    assert not (index / "tree").exists() and (index / "catalogue.sqlite").exists()
    empty = blendrag("stats", "--tree")
    assert empty.exit_code == 0 and "tree_bytes" in empty.stderr and not empty.stdout
    assert json.loads(blendrag("stats", "--tree", "--json").stdout) == []
    assert "exact prefixes: 0.0 MiB" in blendrag("gc", "--tree").stdout


def test_tree_of_an_index_in_use_is_kept(blendrag: Blendrag, index: Path) -> None:
    lock = IndexLock(index)
    assert blendrag("gc", "--tree").exit_code == 1 and (index / "tree").exists()
    lock.release()


def test_questions_that_cannot_be_read_are_one_line_and_start_no_engine(
    blendrag: Blendrag, index: Path
) -> None:
    result = blendrag("ingest", "--questions", "none.txt")
    assert result.exit_code == 1 and "none.txt" in result.stderr and len(result.stderr.splitlines()) == 1
