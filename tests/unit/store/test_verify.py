"""verify, repair and gc on real folders: whatever happened to the files is found, and put right once."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendrag.errors import StoreError, StoreInUseError
from blendrag.files.lock import IndexLock
from blendrag.index.ledger import Ledger
from blendrag.index.loaders import Document
from blendrag.index.vectors import VectorStore
from blendrag.store.catalogue import Catalogue
from blendrag.store.maintenance import verify
from blendrag.store.maintenance.closed_index import closed_index
from blendrag.store.maintenance.verify import Verifier
from blendrag.store.record import Layout
from blendrag.store.tiers import DiskTier, TierError, TierSpec
from closed import DISK, collected, filled, flip, found, verified, write_record
from noted import Noted
from stores import (
    IDENTITY,
    LAYOUT,
    A,
    B,
    C,
    D,
    make_chunk,
    make_record,
    open_stack,
    record_of,
    register,
    release,
    states,
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all of hypothesis' examples, which leave it as it was."""
    return filled(tmp_path_factory.mktemp("shared") / "index")


def test_sound_index_is_called_sound(root: Path) -> None:
    report = verified(root)
    assert (report.records, report.left, report.problems) == (4, 0, [])
    assert report.bytes == sum(record_of(root, chunk.key).stat().st_size for chunk in (A, B, C, D))


@given(st.data())
def test_flipped_bit_anywhere_in_a_record_is_found(shared: Path, data: st.DataObject) -> None:
    path = record_of(shared, A.key)
    whole = path.read_bytes()
    flip(path, data.draw(st.integers(0, len(whole) - 1)))
    try:
        assert found(verified(shared)) == {"damaged": [A.key]}
    finally:
        path.write_bytes(whole)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def swap(path: Path) -> None:
    shutil.copy(record_of(path.parents[2], B.key), path)


def of_another_model(path: Path) -> None:
    other = replace(IDENTITY, weights="weights-2")
    chunk = make_chunk(0, identity=other)
    path.write_bytes(Layout(other, "bfloat16").encode(A.key, chunk.token_ids, chunk.kv).bytes())


def of_other_tokens(path: Path) -> None:
    """Every checksum is right: only the key shows that these are not the chunk's tokens."""
    path.write_bytes(LAYOUT.encode(A.key, B.token_ids, B.kv).bytes())


@pytest.mark.parametrize("harm", [cut, extend, swap, of_another_model, of_other_tokens])
def test_record_that_is_not_its_chunks_is_found_put_aside_and_prefilled_again(
    root: Path, harm: Callable[[Path], None]
) -> None:
    harm(record_of(root, A.key))
    assert found(verified(root)) == {"damaged": [A.key]}
    assert states(root)[A.key] == "ready"  # looking changes nothing
    report = verified(root, repair=True)
    assert (report.left, report.repaired) == (0, 1)
    assert states(root) == {A.key: "pending", B.key: "ready", C.key: "ready", D.key: "ready"}
    again = verified(root)
    assert (again.records, again.problems, again.quarantined) == (3, [], 1)
    store = open_stack(root, DISK)
    assert store.put(A.key, A.token_ids, A.kv) > 0
    store.close()
    assert verified(root).records == 4


def lose(root: Path) -> str:
    record_of(root, A.key).unlink()
    return A.key


def leave_orphan(root: Path) -> str:
    return write_record(root, make_record(make_chunk(99))).stem


def leave_half(root: Path) -> str:
    (root / "kv" / "tmp" / f"{A.key}.123.0").write_bytes(b"half")
    return f"{A.key}.123.0"


@pytest.mark.parametrize(
    ("harm", "kind"), [(lose, "missing"), (leave_orphan, "orphan"), (leave_half, "half-written")]
)
def test_file_too_few_or_too_many_is_found_and_dealt_with_once(
    root: Path, harm: Callable[[Path], str], kind: str
) -> None:
    name = harm(root)
    for _ in range(2):  # looking changes nothing
        assert found(verified(root)) == {kind: [name]}
    assert verified(root, repair=True).left == 0
    assert states(root)[A.key] == ("pending" if kind == "missing" else "ready")
    assert found(verified(root)) == {} and not list((root / "kv").rglob(f"{make_chunk(99).key}*"))


def test_missing_folder_of_all_files_is_no_crash(root: Path) -> None:
    shutil.rmtree(root / "kv")
    assert sorted(found(verified(root))["missing"]) == sorted(chunk.key for chunk in (A, B, C, D))


def test_files_that_are_not_the_stores_are_named_and_left_alone(root: Path, tmp_path: Path) -> None:
    """Even links: following one would read, or delete, what is somewhere else."""
    outside = tmp_path / "outside"
    outside.write_text("precious")
    (root / "kv" / "notes.txt").write_text("mine")
    (root / "kv" / "ab").mkdir(exist_ok=True)
    link = root / "kv" / "ab" / f"ab{'0' * 30}.safetensors"
    link.symlink_to(outside)
    misplaced = root / "kv" / "ab" / f"cd{'0' * 30}.safetensors"
    misplaced.write_text("?")
    for _ in range(2):
        names = {str(path.relative_to(root)) for path in (root / "kv" / "notes.txt", link, misplaced)}
        report = verified(root, repair=True)
        assert set(found(report)["stranger"]) == names and report.left == 0
        collected(root)
    assert outside.read_text() == "precious" and misplaced.exists()


def test_record_that_was_written_and_not_noted_is_no_problem(root: Path) -> None:
    """As after a crash between the file and its row: the next opening takes it in. Unless it is damaged."""
    catalogue = Catalogue.open(root, IDENTITY)
    catalogue.mark([A.key, B.key], "pending")
    assert (verified(root).records, verified(root).left) == (4, 0)
    flip(record_of(root, A.key), -1)
    assert found(verified(root)) == {"damaged": [A.key]}
    assert collected(root).files == {}  # gc does not take what can still be used
    assert verified(root, repair=True).left == 0
    open_stack(root, DISK).close()
    assert states(root)[B.key] == "ready" and states(root)[A.key] == "pending"


def test_document_that_was_deleted_without_an_engine_leaves_no_problem(root: Path) -> None:
    release(root)
    report = verified(root)
    assert (report.doomed, report.records, report.problems) == (4, 0, [])
    assert collected(root).files == {"doomed": 4}
    assert verified(root).doomed == 0 and not list((root / "kv").glob("??/*"))


def test_damaged_catalogue_is_found(root: Path) -> None:
    register(root, [make_chunk(seed) for seed in range(100, 400)], owner="more")
    with sqlite3.connect(root / "catalogue.sqlite") as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (page,) = db.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'owners_by_key'").fetchone()
        (size,) = db.execute("PRAGMA page_size").fetchone()
    with (root / "catalogue.sqlite").open("r+b") as file:
        file.seek((page - 1) * size + 8)
        file.write(b"\xff" * 64)
    report = verified(root, repair=True)
    assert "database" in found(report) and report.left > 0


@pytest.mark.parametrize("name", ["ledger.sqlite", "chroma/chroma.sqlite3"])
def test_damage_of_any_database_is_found(name: str, root: Path) -> None:
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_bytes(b"no database" * 1000)
    assert found(verified(root, repair=True)) == {"database": [name]}
    assert verified(root).left == 1


def test_rows_that_are_not_in_the_vector_store_are_said(root: Path) -> None:
    with closing(Ledger(root)) as ledger:
        ledger.record(Document("text", "a"), [A.key, B.key], "f")
    tables = "CREATE TABLE embeddings (segment_id); CREATE TABLE segments (id, collection);"
    tables += " CREATE TABLE collections (id, name); INSERT INTO segments VALUES (1, 1), (2, 2);"
    tables += " INSERT INTO collections VALUES (1, 'chunks'), (2, 'of another program')"
    assert found(verified(root)) == {"vectors": ["chroma"]}
    (root / "chroma").mkdir()
    for statement in ("", tables, "INSERT INTO embeddings VALUES (2), (2)"):
        with closing(sqlite3.connect(root / "chroma" / "chroma.sqlite3")) as db:
            db.executescript(statement)
            db.commit()
        report = verified(root)
        assert found(report) == {"vectors": ["chroma"]} and "0 of 2 rows" in report.problems[0].detail
    with closing(sqlite3.connect(root / "chroma" / "chroma.sqlite3")) as db, db:
        db.execute("INSERT INTO embeddings VALUES (1), (1)")
    assert verified(root).problems == []


def test_files_of_vectors_that_are_lost_or_cut_off_are_said(root: Path) -> None:
    embedder: Any = SimpleNamespace(name="stub", embed=lambda texts: [[1.0, 0.0] for _ in texts])
    with closing(VectorStore(root, embedder)) as store:
        store.put("a", [(f"k{number}", "10") for number in range(1100)])
    (header,) = root.glob("chroma/*/header.bin")
    assert verified(root).problems == []
    os.truncate(header, 10)
    assert found(verified(root)) == {"vectors": [f"chroma/{header.parent.name}"]}
    header.unlink()
    assert found(verified(root)) == {"vectors": [f"chroma/{header.parent.name}"]}


def test_empty_file_is_no_catalogue(tmp_path: Path) -> None:
    (tmp_path / "catalogue.sqlite").touch()
    with pytest.raises(StoreError, match="no index at"), closed_index(tmp_path):
        pass


def test_index_without_an_engines_work_is_sound(tmp_path: Path) -> None:
    register(tmp_path, [A])
    assert (verified(tmp_path).left, verified(tmp_path).records) == (0, 0)


def test_index_that_is_open_elsewhere_is_not_touched(root: Path) -> None:
    lock = IndexLock(root)
    with pytest.raises(StoreInUseError), closed_index(root):
        pass
    lock.release()


def test_folder_without_an_index_is_not_made_into_one(tmp_path: Path) -> None:
    (tmp_path / "my-index").mkdir()
    with pytest.raises(StoreError, match="did you mean 'my-index'"), closed_index(tmp_path / "my-indx"):
        pass
    with pytest.raises(StoreError, match="no index at"), closed_index(tmp_path / "my-index"):
        pass
    assert list((tmp_path / "my-index").iterdir()) == [] and not (tmp_path / "my-indx").exists()


# -- other tiers, and failing reads ---------------------------------------------------------------------


def test_file_that_cannot_be_read_now_is_not_called_damaged(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a repair under a process with too many open files would put every record aside."""

    def refuse(self: DiskTier, keys: list[str]) -> dict[str, TierError]:
        return {key: TierError(f"{key}: Too many open files") for key in keys}

    monkeypatch.setattr(DiskTier, "open", refuse)
    with pytest.raises(StoreError, match="Too many open files"):
        verified(root, repair=True)
    monkeypatch.undo()
    assert (verified(root).records, verified(root).left) == (4, 0)


class Unreachable(DiskTier):
    def has(self, keys: object) -> set[str]:
        raise TierError("gone")


def test_chunk_that_another_tier_has_is_not_missing(root: Path, tmp_path: Path) -> None:
    other = DiskTier(TierSpec(kind="disk"), LAYOUT, tmp_path / "other")
    other.put(make_record(A))
    record_of(root, A.key).unlink()
    assert found(verified(root, other)) == {}
    record_of(root, B.key).unlink()
    assert found(verified(root, other)) == {"missing": [B.key]}


def test_chunks_of_a_tier_that_cannot_be_asked_are_neither_missing_nor_sound(
    root: Path, tmp_path: Path
) -> None:
    record_of(root, A.key).unlink()
    report = verified(root, Unreachable(TierSpec(kind="disk"), LAYOUT, tmp_path / "other"), repair=True)
    assert (report.unasked, report.left, report.records) == (1, 0, 3)
    assert states(root)[A.key] == "ready"


# -- size -------------------------------------------------------------------------------------------------


def test_progress_ends_near_what_it_promised(root: Path) -> None:
    progress = Noted()
    with closed_index(root) as index:
        Verifier(index, progress=progress).run()
    heads = 4 * make_record(A).head.begin
    assert progress.done + heads == progress.expected > 0


def test_only_a_thousand_problems_are_listed_and_all_are_counted(tmp_path: Path) -> None:
    catalogue = Catalogue.open(tmp_path, IDENTITY)
    catalogue.settle_dtype("bfloat16")
    catalogue.register("doc", [(f"{n:032x}", "", (n,)) for n in range(1200)])
    for n in range(1200):
        catalogue.mark_ready(f"{n:032x}", 1)
    catalogue.close()
    report = verified(tmp_path)
    assert len(report.problems) == 1000 and report.counts["missing"] == 1200 == report.left


def test_record_is_read_a_few_layers_at_a_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory: one layer of one record at least, and no more than the limit else."""
    monkeypatch.setattr(verify, "_AT_ONCE", 1)
    largest = 0
    empty = torch.empty

    def watched(*shape: object, **options: object) -> torch.Tensor:
        nonlocal largest
        made: torch.Tensor = empty(*shape, **options)  # type: ignore[call-overload]
        largest = max(largest, made.numel())
        return made

    monkeypatch.setattr(torch, "empty", watched)
    assert verified(root).records == 4
    assert largest == make_record(A).head.row_bytes


# -- gc: all that is useless goes, and nothing else -----------------------------------------------------


def test_gc_takes_all_that_is_useless_and_nothing_else(root: Path) -> None:
    write_record(root, make_record(make_chunk(99)))
    (root / "kv" / "tmp" / "half").write_bytes(b"12345")
    flip(record_of(root, A.key), -1)
    verified(root, repair=True)
    (root / "kv" / "tmp" / "half").write_bytes(b"12345")
    write_record(root, make_record(make_chunk(99)))
    catalogue = Catalogue.open(root, IDENTITY)
    catalogue.evict([B.key])
    catalogue.evict([C.key], keep_ready=True)
    catalogue.close()
    size = record_of(root, D.key).stat().st_size
    freed = collected(root)
    assert freed.files == {"orphan": 1, "doomed": 2, "quarantined": 1, "half-written": 1}
    assert {kind: freed.bytes[kind] for kind in freed.files} == {
        "orphan": size, "doomed": 2 * size, "quarantined": size, "half-written": 5
    }  # fmt: skip
    left = [path.name for path in (root / "kv").rglob("*") if path.is_file()]
    assert left == [f"{D.key}.safetensors"]
    assert states(root) == {A.key: "pending", B.key: "evicted", C.key: "ready", D.key: "ready"}
    assert collected(root).files == {}


def test_gc_gives_back_what_deleted_texts_took(tmp_path: Path) -> None:
    catalogue = Catalogue.open(tmp_path, IDENTITY)
    catalogue.register("doc", [(f"{n:032x}", f"SECRET {n}" * 1000, (n,)) for n in range(100)])
    catalogue.release("doc")
    catalogue.close()
    before = (tmp_path / "catalogue.sqlite").stat().st_size
    freed = collected(tmp_path)
    assert freed.bytes["catalogue.sqlite"] > 500_000
    assert (tmp_path / "catalogue.sqlite").stat().st_size < before / 10
    assert b"SECRET" not in (tmp_path / "catalogue.sqlite").read_bytes()
