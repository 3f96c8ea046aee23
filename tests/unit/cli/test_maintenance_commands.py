"""verify, gc, purge and stats as a user calls them, without an engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from blendrag.errors import StoreError
from blendrag.files.lock import IndexLock
from blendrag.store.catalogue import Catalogue
from blendrag.store.maintenance import gc
from blendrag.store.maintenance.verify import Verifier
from blendrag.store.tiers import TierSpec
from stores import A, B, C, open_stack, record_of, register, release, states

Blendrag = Callable[..., Result]


@pytest.fixture
def index(workdir: Path) -> Path:
    """The index that commands work on if none is named: three chunks, without documents."""
    root = workdir / "blendrag-index"
    register(root, [A, B, C])
    store = open_stack(root, TierSpec(kind="disk"))
    for chunk in (A, B, C):
        store.put(chunk.key, chunk.token_ids, chunk.kv)
    store.close()
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


def test_index_in_use_is_left_alone(blendrag: Blendrag, index: Path) -> None:
    lock = IndexLock(index)
    for arguments in (["verify"], ["gc"]):
        result = blendrag(*arguments)
        assert result.exit_code == 1 and "is open in" in result.stderr
    lock.release()


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
def made(blendrag: Blendrag, workdir: Path, model_dir: Path) -> Path:
    """An index without documents, but with what two tiers counted and a document was used."""
    (workdir / "empty").mkdir()
    blendrag("ingest", "empty", "--model", model_dir)
    root = workdir / "blendrag-index"
    catalogue = Catalogue.open(root, None)
    catalogue.register("handbook.md", [("k", "text", (1, 2, 3))])
    catalogue.touch({"k": (1, 7)})
    catalogue.count("ram", {"hits": 3, "misses": 1, "evictions": 2, "promotions": 5})
    catalogue.count("redis", {"errors": 4, "refused": 6, "damaged": 8})
    catalogue.close()
    return root


def test_stats_show_every_tier_and_the_documents_that_were_reused(
    blendrag: Blendrag, made: Path, model_dir: Path
) -> None:
    facts = json.loads(blendrag("stats", "--json", "--model", model_dir).stdout)
    assert facts["counters"]["ram"] == {"hits": 3, "misses": 1, "evictions": 2, "promotions": 5}
    assert facts["reuse"] == [{"owner": "handbook.md", "chunks": 1, "tokens": 3, "uses": 7}]
    lines = blendrag("stats", "--model", model_dir).stdout.splitlines()
    (ram,) = [line.split() for line in lines if line.split()[:1] == ["ram"]]
    (redis,) = [line.split() for line in lines if line.split()[:1] == ["redis"]]
    assert ram == ["ram", "75.0%", "3", "1", "5", "2", "0", "0", "0"]
    assert redis == ["redis", "0", "0", "0", "0", "4", "6", "8"]
    assert any(line.split() == ["handbook.md", "7", "1", "3"] for line in lines)


def test_purge_of_an_unknown_document_is_corrected(blendrag: Blendrag, made: Path, model_dir: Path) -> None:
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
    register(root, [A])
    store = open_stack(root, home)
    store.put(A.key, A.token_ids, A.kv)
    store.close()
    monkeypatch.setenv("BLENDRAG_TIERS", json.dumps([home.plain()]))
    assert "1 records are sound" in blendrag("verify").stdout
    release(root)
    (workdir / "big").rename(workdir / "unmounted")
    result = blendrag("gc")
    assert result.exit_code == 1 and "1 chunks to be deleted are in a tier" in result.stderr
    (workdir / "unmounted").rename(workdir / "big")
    assert "doomed: 1 files" in blendrag("gc").stdout
    assert not list((workdir / "big").rglob("*.safetensors"))
