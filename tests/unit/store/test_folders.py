"""Folders that are read-only, become so, belong to others, are written by two, or whose clock is wrong."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from blendrag.errors import StoreError
from blendrag.store.catalogue import Catalogue
from blendrag.store.kv_store import KVStore
from blendrag.store.record import Miss
from blendrag.store.tiers import DiskTier, TierError, TierSpec
from forked import Forked
from mounts import Mount
from stores import (
    IDENTITY,
    LAYOUT,
    RECORD,
    A,
    B,
    C,
    D,
    files,
    filled,
    filled_stack,
    get,
    holds,
    make_chunk,
    make_record,
    open_stack,
    open_store,
    problems,
    put,
    record_of,
    register,
    release,
    same,
    shared,
    states,
)


def second_read_only(
    tmp_path: Path, mount: Mount
) -> tuple[Callable[[str], None], tuple[TierSpec, TierSpec], KVStore]:
    """A stack of the own folder and a second one, both of which have a chunk, the second read-only by now."""
    become, stack = mount(tmp_path / "slow"), (TierSpec(kind="disk"), shared(tmp_path / "slow"))
    store = filled_stack(tmp_path / "index", [A], *stack)
    become("ro")
    return become, stack, store


# -- read-only ------------------------------------------------------------------------------------------


def test_read_only_index_is_refused_with_what_to_do_about_it(tmp_path: Path, mount: Mount) -> None:
    become = mount(tmp_path / "index")
    filled(tmp_path / "index", [A]).close()
    become("ro")
    with pytest.raises(StoreError, match="allow this user to write") as caught:
        open_store(tmp_path / "index")
    assert str(tmp_path / "index") in str(caught.value)
    become("rw")
    store = open_store(tmp_path / "index")
    assert same(get(store, A), A)


def test_read_only_folder_of_records_serves_as_a_tier_that_is_only_read(tmp_path: Path, mount: Mount) -> None:
    become = mount(tmp_path / "library")
    filled_stack(tmp_path / "one", [A], shared(tmp_path / "library")).close()
    become("ro")
    register(tmp_path / "two", [A, B])
    store = open_stack(tmp_path / "two", TierSpec(kind="disk"), shared(tmp_path / "library", write="never"))
    assert same(get(store, A), A)
    assert put(store, B) == RECORD
    assert holds(store, A, B) == [[True, True], [True, False]]
    store.close()
    with pytest.raises(StoreError, match="library"):
        open_stack(tmp_path / "two", TierSpec(kind="ram"), shared(tmp_path / "library" / "new"))


@pytest.mark.parametrize("limit", [None, 2 * RECORD])
def test_folder_that_becomes_read_only_costs_nothing_that_is_stored(
    tmp_path: Path, mount: Mount, limit: int | None
) -> None:
    become = mount(tmp_path / "kv")
    store = filled(tmp_path, [A, B], disk=limit)
    register(tmp_path, [A, B, C, D])
    become("ro")
    for chunk in (C, D, A):  # and nothing is evicted for what cannot be written
        with pytest.raises(StoreError, match=r"cannot write.*[Rr]ead-only"):
            put(store, chunk)
    assert all(same(get(store, chunk), chunk) for chunk in (A, B))
    assert get(store, C) == Miss("missing")
    before = {A.key: "ready", B.key: "ready", C.key: "pending", D.key: "pending"}
    assert states(tmp_path) == before
    become("rw")
    assert put(store, C) == RECORD
    assert problems(tmp_path) == []


def test_file_that_could_not_be_deleted_is_deleted_by_the_next_opening(tmp_path: Path, mount: Mount) -> None:
    become = mount(tmp_path / "kv")
    store = filled(tmp_path, [A, B])
    become("ro")
    catalogue = Catalogue.open(tmp_path, IDENTITY)
    gone = catalogue.register("doc", [(B.key, "", B.token_ids)])
    assert store.delete(gone) == (0, ["disk"])
    store.close()
    become("rw")
    assert len(files(tmp_path)) == 2
    open_store(tmp_path).close()
    assert files(tmp_path) == {f"{B.key}.safetensors"}


def test_file_of_a_second_folder_that_could_not_be_deleted_is_deleted_by_the_next_opening(
    tmp_path: Path, mount: Mount
) -> None:
    become, stack, store = second_read_only(tmp_path, mount)
    release(tmp_path / "index")
    assert store.delete([A.key]) == (1, [f"disk {tmp_path / 'slow'}"])
    store.close()
    become("rw")
    store = open_stack(tmp_path / "index", *stack)
    assert holds(store, A) == [[False], [False]]


def test_deletion_everywhere_changes_nothing_here_while_a_second_folder_keeps_a_file(
    tmp_path: Path, mount: Mount
) -> None:
    _, _, store = second_read_only(tmp_path, mount)
    assert store.delete([A.key], everywhere=True) == (0, [f"disk {tmp_path / 'slow'}"])
    assert holds(store, A) == [[True], [True]] and store.holds(A.key)


# -- removed by others ----------------------------------------------------------------------------------


def test_record_that_somebody_removed_takes_no_room_and_stays_wanted(tmp_path: Path) -> None:
    store = filled(tmp_path, [A, B], disk=2 * RECORD)
    register(tmp_path, [A, B, C])
    record_of(tmp_path, A.key).unlink()
    assert get(store, A) == Miss("missing")
    assert put(store, C) == RECORD
    assert states(tmp_path) == {A.key: "pending", B.key: "ready", C.key: "ready"}
    assert store.tiers[-1].stats()["chunks"] == 2


def test_full_folder_whose_records_were_removed_is_written_to_again(tmp_path: Path) -> None:
    filled(tmp_path, [A, B], disk=2 * RECORD).close()
    for folder in (tmp_path / "kv").glob("??"):
        shutil.rmtree(folder)
    register(tmp_path, [A, B, C, D])
    store = open_store(tmp_path, disk=2 * RECORD)
    assert put(store, C, D) == 2 * RECORD
    assert all(same(get(store, chunk), chunk) for chunk in (C, D))


def test_record_that_vanishes_while_a_folder_is_searched_is_passed_over(tmp_path: Path) -> None:
    tier = DiskTier(TierSpec(kind="disk"), LAYOUT, tmp_path)
    tier.put(make_record(A))
    tier.path(A.key).with_stem("vanished").symlink_to("nowhere")
    tier = DiskTier(TierSpec(kind="disk", chunks=2), LAYOUT, tmp_path)
    tier.put(make_record(B))
    assert tier.stats()["chunks"] == 2


def test_folder_that_cannot_be_asked_has_not_lost_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path, [A])

    def refused(*_: object) -> bool:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", refused)
        with pytest.raises(TierError, match="disk: Permission denied"):
            store.tiers[-1].has([A.key])
        assert not store.holds(A.key) and store.check([]) == []
    assert states(tmp_path) == {A.key: "ready"} and store.holds(A.key)


# -- modes ----------------------------------------------------------------------------------------------


def test_nobody_else_may_read_anything_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = filled_stack(
            tmp_path / "index", [A, B], TierSpec(kind="disk", chunks=1), shared(tmp_path / "common")
        )
        next((tmp_path / "index" / "kv").glob(f"*/{B.key}*")).write_bytes(b"damaged")
        assert same(get(store, B), B)  # from the tier below; the damaged one is put aside
        modes = {
            path.relative_to(tmp_path): stat.S_IMODE(path.stat().st_mode)
            for path in tmp_path.rglob("*")
            if path != tmp_path / "common"  # made as the user wishes, like any folder above the store's own
        }
        store.close()
    finally:
        os.umask(before)
    assert len([path for path in modes if "quarantine" in path.parts]) == 2
    for path, mode in modes.items():
        assert mode == (0o700 if (tmp_path / path).is_dir() else 0o600), f"{path} has {mode:o}"


# -- two writers ----------------------------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
from stores import *
store = open_stack(Path(sys.argv[1]), TierSpec(kind="ram", bytes=0), shared(Path(sys.argv[2])))
chunks = [make_chunk(seed, tokens=200) for seed in range(5)]
print("open", flush=True)
sys.stdin.readline()
for n in range(60):
    chunk = chunks[n % 5]
    assert put(store, chunk) == size(chunk)
    assert same(get(store, chunk), chunk)
print("done", store.tiers[-1].stats()["damaged"], store.tiers[-1].stats()["errors"])
store.close()
"""


def test_two_processes_writing_the_same_chunks_never_tear_one(tmp_path: Path) -> None:
    chunks = [make_chunk(seed, tokens=200) for seed in range(5)]
    for name in ("one", "two"):
        register(tmp_path / name, chunks)
    writers = [Forked(WRITER, tmp_path / name, tmp_path / "common") for name in ("one", "two")]
    for writer in writers:
        assert writer.stdout.readline() == "open\n"
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        assert writer.finished(120) == "done 0 0\n"
    left = {path.name for path in (tmp_path / "common").rglob("*") if path.is_file()}
    assert left == {f"{chunk.key}.safetensors" for chunk in chunks}


def test_opening_does_not_sweep_what_another_process_is_writing(tmp_path: Path) -> None:
    """But what a process left there that died long ago."""
    register(tmp_path / "one", [A])
    open_stack(tmp_path / "one", shared(tmp_path / "common")).close()
    (folder,) = (tmp_path / "common").glob("*/tmp")
    (folder / "being written").write_bytes(b"half")
    (folder / "left").write_bytes(b"half")
    os.utime(folder / "left", (0, 0))
    open_stack(tmp_path / "one", shared(tmp_path / "common")).close()
    assert [path.name for path in folder.iterdir()] == ["being written"]


# -- the clock ------------------------------------------------------------------------------------------


def test_clock_going_backwards_loses_nothing_and_keeps_the_order_of_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 2_000_000_000 * 10**9

    def backwards() -> int:
        nonlocal now
        now -= 3600 * 10**9
        return now

    monkeypatch.setattr(time, "time_ns", backwards)
    monkeypatch.setattr(time, "time", lambda: backwards() / 1e9)
    store = filled(tmp_path, [A, B, C])
    for chunk in (A, C):
        assert same(get(store, chunk), chunk)
    store.close()
    store = open_store(tmp_path, disk=3 * RECORD)
    register(tmp_path, [A, B, C, D])
    put(store, D)
    assert states(tmp_path) == {A.key: "ready", B.key: "evicted", C.key: "ready", D.key: "ready"}
    assert problems(tmp_path) == []
