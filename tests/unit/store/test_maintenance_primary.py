"""verify and gc where the KV is not in the index's folder, and where they may not write."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from blendrag.errors import StoreError
from blendrag.store.maintenance.closed_index import closed_index, other_tiers
from blendrag.store.maintenance.verify import Verifier, VerifyReport
from blendrag.store.tiers import TierSpec
from closed import collected, flip, found
from stores import (
    LAYOUT,
    RECORD,
    A,
    B,
    C,
    filled_stack,
    make_chunk,
    register,
    release,
    shared,
    states,
)

RAM, DISK = TierSpec(kind="ram", bytes=1 << 20), TierSpec(kind="disk")


@pytest.fixture
def big(tmp_path: Path) -> Path:
    """Where the home tier of two indexes keeps its files: A and B of "one", B and C of "two"."""
    big = tmp_path / "big"
    for name, chunks in (("one", (A, B)), ("two", (B, C))):
        filled_stack(tmp_path / name, chunks, RAM, shared(big)).close()
    return big


def record(big: Path, key: str) -> Path:
    return big / LAYOUT.digest / key[:2] / f"{key}.safetensors"


def verified(root: Path, *stack: TierSpec, repair: bool = False) -> VerifyReport:
    with closed_index(root) as index, other_tiers(index.catalogue, stack) as others:
        return Verifier(index, others, stack=stack, repair=repair).run()


def doomed(root: Path) -> set[str]:
    with closed_index(root) as index:
        return set(index.catalogue.doomed())


def test_deleted_documents_kv_does_not_stay_in_a_home_elsewhere(tmp_path: Path, big: Path) -> None:
    release(tmp_path / "one")
    freed = collected(tmp_path / "one", RAM, shared(big))
    assert (freed.files, freed.bytes["doomed"], freed.left) == ({"doomed": 2}, 2 * RECORD, 0)
    assert not record(big, A.key).exists() and not record(big, B.key).exists()
    assert doomed(tmp_path / "one") == set()


def test_another_indexs_record_in_the_same_folder_is_not_taken_for_an_orphan(
    tmp_path: Path, big: Path
) -> None:
    stack = (RAM, shared(big))
    assert collected(tmp_path / "one", *stack).files == {}
    report = verified(tmp_path / "one", *stack, repair=True)
    assert (report.records, report.foreign, report.problems) == (2, 1, [])
    assert record(big, C.key).exists()


def test_deletion_from_a_slower_tier_is_not_forgotten(tmp_path: Path) -> None:
    stack = (DISK, shared(tmp_path / "slow"))
    filled_stack(tmp_path / "one", [A], *stack).close()
    release(tmp_path / "one")
    assert collected(tmp_path / "one", *stack).files == {"doomed": 2}
    assert not list((tmp_path / "slow").rglob(f"{A.key}*"))


def test_record_in_a_tier_that_is_only_read_is_not_collected(tmp_path: Path, big: Path) -> None:
    release(tmp_path / "one")
    assert collected(tmp_path / "one", DISK, shared(big, write="never")).files == {}
    assert record(big, A.key).exists()


@pytest.mark.parametrize("away", ["folder", "server"])
def test_deletion_that_could_not_be_confirmed_is_still_to_be_done(
    tmp_path: Path, big: Path, away: str
) -> None:
    release(tmp_path / "one")
    server = TierSpec(kind="redis", url="redis://127.0.0.1:1", timeout_s=0.2)
    big.rename(tmp_path / "unmounted")
    freed = collected(tmp_path / "one", RAM, shared(big) if away == "folder" else server)
    assert freed.left == 2 and doomed(tmp_path / "one") == {A.key, B.key}
    (tmp_path / "unmounted").rename(big)
    assert collected(tmp_path / "one", RAM, shared(big)).files == {"doomed": 2}


def test_damaged_record_of_a_home_elsewhere_is_found_and_put_aside(tmp_path: Path, big: Path) -> None:
    flip(record(big, A.key), -1)
    stack = (RAM, shared(big))
    assert found(verified(tmp_path / "one", *stack)) == {"damaged": [A.key]}
    assert verified(tmp_path / "one", *stack, repair=True).left == 0
    assert states(tmp_path / "one") == {A.key: "pending", B.key: "ready"}
    report = verified(tmp_path / "one", *stack)
    assert (report.records, report.quarantined, report.left) == (1, 1, 0)


def test_record_that_a_home_elsewhere_lost_is_missing(tmp_path: Path, big: Path) -> None:
    record(big, A.key).unlink()
    assert found(verified(tmp_path / "one", RAM, shared(big))) == {"missing": [A.key]}


def test_what_another_process_is_writing_is_not_called_half_written(tmp_path: Path, big: Path) -> None:
    temporary = big / LAYOUT.digest / "tmp"
    for name in ("new", "old"):
        (temporary / name).write_bytes(b"12345")
    os.utime(temporary / "old", (0, 0))
    (big / LAYOUT.digest / "notes.txt").touch()
    stack = (RAM, shared(big))
    problems = found(verified(tmp_path / "one", *stack))
    assert problems == {"half-written": ["old"], "stranger": [f"{LAYOUT.digest}/notes.txt"]}
    assert collected(tmp_path / "one", *stack).files == {"half-written": 1}
    assert (temporary / "new").exists()


def test_chunks_that_are_not_read_are_told_of(tmp_path: Path, big: Path) -> None:
    report = verified(tmp_path / "one", DISK, shared(big))
    assert (report.records, report.elsewhere, report.left) == (0, 2, 0)


# -- folders that cannot be written -----------------------------------------------------------------------


@pytest.fixture
def read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index with an orphan, of whose files none can be removed or moved."""
    filled_stack(tmp_path / "index", [A], DISK).close()
    kv = tmp_path / "index" / "kv"
    orphan = make_chunk(99).key
    (kv / orphan[:2]).mkdir(exist_ok=True)
    (kv / orphan[:2] / f"{orphan}.safetensors").touch()

    def refuse(kind: str) -> None:
        real = getattr(os, kind)

        def refused(path: object, *rest: object, **options: object) -> None:
            if str(path).endswith(".safetensors"):
                raise PermissionError(13, "Permission denied", str(path))
            real(path, *rest, **options)

        monkeypatch.setattr(os, kind, refused)

    refuse("unlink")
    refuse("replace")
    return tmp_path / "index"


@pytest.mark.parametrize("care", [collected, partial(verified, repair=True)], ids=["gc", "repair"])
def test_file_that_may_not_be_removed_is_named(read_only: Path, care: Callable[..., object]) -> None:
    with pytest.raises(StoreError, match=r"cannot remove .*safetensors': Permission denied"):
        care(read_only, DISK)


def test_damaged_file_that_cannot_be_put_aside_is_not_called_repaired(read_only: Path) -> None:
    path = read_only / "kv" / A.key[:2] / f"{A.key}.safetensors"
    flip(path, -1)
    next((read_only / "kv").glob(f"??/{make_chunk(99).key}*")).rename(read_only / "kv" / "tmp" / "orphan")
    with pytest.raises(StoreError, match=f"cannot put .*{A.key}"):
        verified(read_only, DISK, repair=True)
    assert states(read_only) == {A.key: "ready"}


def test_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(tmp_path, [A])
    real = os.scandir

    def refused(path: object) -> object:
        if str(path).endswith("tmp"):
            raise PermissionError(13, "Permission denied")
        return real(path)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", refused)
    for care in (collected, verified):
        with pytest.raises(StoreError, match=r"cannot read .*tmp': Permission denied"):
            care(tmp_path, DISK)
