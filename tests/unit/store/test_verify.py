"""verify and repair on real folders: whatever happened to the files, it is found, and put right once."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.errors import StoreError, StoreInUseError
from blendrag.files.lock import IndexLock
from blendrag.store.catalogue import Catalogue
from blendrag.store.maintenance.closed_index import closed_index
from blendrag.store.record import Layout
from closed import DISK, collected, filled, flip, found, verified, write_record
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
    record = Layout(other, "bfloat16").encode(A.key, chunk.token_ids, chunk.kv)
    path.write_bytes(record.head.bytes() + record.rows.numpy().tobytes())


def of_other_tokens(path: Path) -> None:
    """Every checksum is right: only the key shows that these are not the chunk's tokens."""
    record = LAYOUT.encode(A.key, B.token_ids, B.kv)
    path.write_bytes(record.head.bytes() + record.rows.numpy().tobytes())


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


def test_missing_file_is_found_and_prefilled_again(root: Path) -> None:
    record_of(root, A.key).unlink()
    assert found(verified(root)) == {"missing": [A.key]}
    assert verified(root, repair=True).left == 0
    assert states(root)[A.key] == "pending"
    assert found(verified(root)) == {}


def test_missing_folder_of_all_files_is_no_crash(root: Path) -> None:
    shutil.rmtree(root / "kv")
    assert sorted(found(verified(root))["missing"]) == sorted(chunk.key for chunk in (A, B, C, D))


def test_orphan_is_found_and_dropped(root: Path) -> None:
    stray = make_record(make_chunk(99))
    path = write_record(root, stray)
    assert found(verified(root)) == {"orphan": [stray.key]} and path.exists()
    assert verified(root, repair=True).left == 0
    assert not path.exists() and found(verified(root)) == {}


def test_half_written_file_is_found_and_dropped(root: Path) -> None:
    (root / "kv" / "tmp" / f"{A.key}.123.0").write_bytes(b"half")
    assert found(verified(root)) == {"half-written": [f"{A.key}.123.0"]}
    assert verified(root, repair=True).left == 0
    assert found(verified(root)) == {}


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
    catalogue.close()
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
    assert "catalogue" in found(report) and report.left > 0


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
    assert list((tmp_path / "my-index").iterdir()) == [] and not (tmp_path / "my-indx").exists()
