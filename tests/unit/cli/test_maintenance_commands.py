"""verify, gc, purge and stats as a user calls them, without an engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from blendrag.cli.ingest import _read_questions
from blendrag.errors import StoreError
from blendrag.files.lock import IndexLock
from blendrag.store.catalogue import Catalogue
from blendrag.store.maintenance import gc
from blendrag.store.maintenance.verify import Verifier
from blendrag.store.tiers import TierSpec
from blendrag.tree import path_of
from blendrag.tree.layout import NodeBlocks
from blendrag.tree.states import StateTree
from blendrag.tree.store import NodeStore, StoredNode
from blendrag.tree.tree import Tree
from stores import IDENTITY, A, B, C, filled_stack, record_of, register, release, states

Blendrag = Callable[..., Result]


@pytest.fixture
def index(workdir: Path) -> Path:
    """The index that commands work on if none is named: three chunks, without documents."""
    root = workdir / "blendrag-index"
    filled_stack(root, [A, B, C], TierSpec(kind="disk")).close()
    return root


def test_verify_exits_with_1_until_the_problem_is_repaired(blendrag: Blendrag, index: Path) -> None:
    assert blendrag("verify").exit_code == 0
    record_of(index, A.key).write_bytes(b"garbage")
    result = blendrag("verify")
    assert result.exit_code == 1 and f"damaged: {A.key}" in result.stderr and "1 damaged" in result.stdout
    report = json.loads(blendrag("verify", "--json").stdout)
    assert report["counts"] == {"damaged": 1} and report["records"] == 2
    assert [(problem["kind"], problem["name"]) for problem in report["problems"]] == [("damaged", A.key)]
    (index / "kv" / "notes.txt").write_text("a file of somebody's")
    result = blendrag("verify", "--repair")
    assert result.exit_code == 0 and "repaired: 1" in result.stdout and "notes.txt" in result.stderr
    assert states(index)[A.key] == "pending"
    result = blendrag("verify")
    assert result.exit_code == 0 and "1 files damaged before, kept aside" in result.stdout


def test_gc_says_what_it_freed(blendrag: Blendrag, index: Path) -> None:
    release(index)
    assert "doomed: 3 files" in blendrag("gc").stdout
    freed = json.loads(blendrag("gc", "--json").stdout)
    assert freed["files"] == {} and freed["total"] >= 0


def test_interrupted_command_says_what_is_left(
    blendrag: Blendrag, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Verifier, "run", interrupt)
    result = blendrag("verify", "--repair")
    assert result.exit_code == 130 and "what was repaired so far stays repaired" in result.stderr


def test_full_disk_ends_gc_with_a_sentence(
    blendrag: Blendrag, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> int:
        raise StoreError(f"{path.name} failed: database or disk is full")

    monkeypatch.setattr(gc, "compact", full)
    result = blendrag("gc")
    assert result.exit_code == 1 and "disk is full" in result.stderr and "Traceback" not in result.stderr


# -- with a real model folder, tokenizer and vector store -------------------------------------------------


@pytest.fixture
def used(made: Path) -> Path:
    """An index without documents, but with what two tiers counted and a document was used."""
    catalogue = Catalogue.open(made, None)
    catalogue.register("handbook.md", [("k", "text", (1, 2, 3))])
    catalogue.touch({"k": (1, 7)})
    catalogue.count("ram", {"hits": 3, "misses": 1, "evictions": 2, "promotions": 5})
    catalogue.count("redis", {"errors": 4, "refused": 6, "damaged": 8})
    catalogue.close()
    return made


def test_stats_show_every_tier_and_the_documents_that_were_reused(
    blendrag: Blendrag, used: Path, model_dir: Path
) -> None:
    facts = json.loads(blendrag("stats", "--json", "--model", model_dir).stdout)
    assert facts["documents"] == 0 and facts["chunks"]["owners"] == 1, "it has no ledger"
    assert facts["counters"]["ram"] == {"hits": 3, "misses": 1, "evictions": 2, "promotions": 5}
    assert facts["reuse"] == [{"owner": "handbook.md", "chunks": 1, "tokens": 3, "uses": 7}]
    lines = blendrag("stats", "--model", model_dir).stdout.splitlines()
    (ram,) = [line.split() for line in lines if line.split()[:1] == ["ram"]]
    (redis,) = [line.split() for line in lines if line.split()[:1] == ["redis"]]
    assert ram == ["ram", "75.0%", "3", "1", "5", "2", "0", "0", "0"]
    assert redis == ["redis", "0", "0", "0", "0", "4", "6", "8"]
    assert any(line.split() == ["handbook.md", "7", "1", "3"] for line in lines)


def test_purge_of_an_unknown_document_is_corrected(blendrag: Blendrag, used: Path, model_dir: Path) -> None:
    result = blendrag("purge", "--document", "hanbook.md", "--model", model_dir)
    assert result.exit_code == 1 and "did you mean 'handbook.md'" in result.stderr
    result = blendrag("purge", "--document", "handbook.md", "--model", model_dir)
    assert result.exit_code == 0 and "handbook.md: 1 chunks" in result.stdout
    assert "did you mean" not in blendrag("purge", "-d", "handbook.md", "--model", model_dir).stderr


def test_gc_and_verify_look_where_the_settings_say(
    blendrag: Blendrag, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = TierSpec(kind="disk", path=workdir / "big")
    root = workdir / "blendrag-index"
    filled_stack(root, [A], home).close()
    monkeypatch.setenv("BLENDRAG_TIERS", json.dumps([home.plain()]))
    assert "1 records are sound" in blendrag("verify").stdout
    release(root)
    (workdir / "big").rename(workdir / "unmounted")
    result = blendrag("gc")
    assert result.exit_code == 1 and "1 chunks to be deleted are in a tier" in result.stderr
    (workdir / "unmounted").rename(workdir / "big")
    assert "doomed: 1 files" in blendrag("gc").stdout
    assert not list((workdir / "big").rglob("*.safetensors"))


# -- exact prefixes, as a user looks after them ---------------------------------------------------------


@pytest.fixture
def branched(workdir: Path) -> Path:
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


def test_tree_is_drawn_with_its_documents(blendrag: Blendrag, branched: Path) -> None:
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


def test_state_behind_a_document_is_drawn_as_one(blendrag: Blendrag, branched: Path) -> None:
    tree, _ = StateTree.open(branched / "tree", IDENTITY)
    coming = tree.next(tree.path(B.token_ids, [(B.key, 0, 8)]), 0, B.token_ids)
    tree.expect(coming.new, B.token_ids)
    for node in coming.new:
        assert tree._catalogue.mark_ready(node.key, 1 << 20)
    tree.close()
    *_, kv, state = blendrag("stats", "--tree").stdout.splitlines()
    assert "8 tokens, 1.0 MiB" in kv and f"state, 1.0 MiB, used 0 times: text {B.key}" in state


def test_cleared_tree_is_gone(blendrag: Blendrag, branched: Path) -> None:
    cleared = blendrag("gc", "--tree")
    assert cleared.exit_code == 0 and "exact prefixes: 0.0 MiB" not in cleared.stdout
    assert not (branched / "tree").exists() and (branched / "catalogue.sqlite").exists()
    empty = blendrag("stats", "--tree")
    assert empty.exit_code == 0 and "tree_bytes" in empty.stderr and not empty.stdout
    assert json.loads(blendrag("stats", "--tree", "--json").stdout) == []
    assert "exact prefixes: 0.0 MiB" in blendrag("gc", "--tree").stdout


def test_index_in_use_is_left_alone(blendrag: Blendrag, branched: Path) -> None:
    lock = IndexLock(branched)
    for arguments in (["verify"], ["gc"], ["gc", "--tree"]):
        result = blendrag(*arguments)
        assert result.exit_code == 1 and "is open in" in result.stderr and (branched / "tree").exists()
    lock.release()


def test_questions_that_cannot_be_read_are_one_line_and_start_no_engine(
    blendrag: Blendrag, branched: Path
) -> None:
    result = blendrag("ingest", "--questions", "none.txt")
    assert result.exit_code == 1 and "none.txt" in result.stderr and len(result.stderr.splitlines()) == 1


def test_mark_that_windows_puts_before_a_file_is_no_part_of_the_first_question(tmp_path: Path) -> None:
    file = tmp_path / "questions.txt"
    file.write_text("Who approves travel?\n", encoding="utf-8-sig")
    assert _read_questions(file) == ["Who approves travel?"]
