from __future__ import annotations

import errno
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import (
    IDENTITY,
    RECORD,
    A,
    B,
    C,
    D,
    filled,
    gone,
    open_store,
    record_of,
    register,
    same,
    states,
)

from blendrag.store.catalogue import Catalogue
from blendrag.store.chunk import Miss
from blendrag.store.disk import DiskTier
from blendrag.store.tier import DamagedError

# -- damage ---------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_flipped_byte_is_dropped_and_wanted_again(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        root = Path(folder)
        store = filled(root, [A])
        file = record_of(root, A.key)
        record = bytearray(file.read_bytes())
        header = 8 + int.from_bytes(record[:8], "little")
        body = (header, len(record) - 1)
        low, high = data.draw(st.sampled_from([(0, 7), (8, header - 1), body, body]))
        at = data.draw(st.integers(low, high))
        record[at] ^= data.draw(st.integers(1, 255))
        file.write_bytes(record)
        found = store.get(A.key, A.token_ids)
        if at >= header or isinstance(found, Miss):  # a space for a tab in the header changes nothing
            assert found == Miss("damaged")
            assert gone(root, A)
            assert store.stats()["damaged"] == 1
            assert store.get(A.key, A.token_ids) == Miss("missing")
            assert store.put(A) == A.nbytes
        assert same(store.get(A.key, A.token_ids), A)
        store.close()


def test_no_flipped_bit_of_a_header_raises_or_changes_what_is_read(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, None)
    disk.put(A)
    file = disk.path(A.key)
    record = file.read_bytes()
    header = 8 + int.from_bytes(record[:8], "little")
    damaged = 0
    for bit in range(8 * header):
        flipped = bytearray(record)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        try:
            assert same(disk.peek(A.key), A)
        except DamagedError:
            damaged += 1
    assert damaged > 7 * header  # nearly all were noticed


@pytest.mark.parametrize("left", [0, 4, 8, 100, -1])
def test_truncated_record_is_dropped_and_wanted_again(tmp_path: Path, left: int) -> None:
    store = filled(tmp_path, [A])
    file = record_of(tmp_path, A.key)
    file.write_bytes(file.read_bytes()[:left])
    assert store.get(A.key, A.token_ids) == Miss("damaged")
    assert gone(tmp_path, A)
    assert store.stats()["damaged"] == 1
    store.close()


def test_record_with_something_appended_is_dropped(tmp_path: Path) -> None:
    store = filled(tmp_path, [A])
    file = record_of(tmp_path, A.key)
    file.write_bytes(file.read_bytes() + b"\0")
    assert store.get(A.key, A.token_ids) == Miss("damaged")
    assert gone(tmp_path, A)
    store.close()


def test_another_chunks_record_under_this_name_is_dropped(tmp_path: Path) -> None:
    store = filled(tmp_path, [A, B])
    record_of(tmp_path, A.key).write_bytes(record_of(tmp_path, B.key).read_bytes())
    assert store.get(A.key, B.token_ids) == Miss("damaged")  # even when asked for what is in the file
    assert states(tmp_path) == {A.key: "pending", B.key: "ready"}
    assert same(store.get(B.key, B.token_ids), B)
    store.close()


def test_deleted_record_is_wanted_again(tmp_path: Path) -> None:
    store = filled(tmp_path, [A])
    record_of(tmp_path, A.key).unlink()
    assert store.get(A.key, A.token_ids) == Miss("missing")
    assert states(tmp_path) == {A.key: "pending"}
    assert store.stats()["disk"]["bytes"] == 0
    assert store.put(A) == A.nbytes
    store.close()


def test_record_that_cannot_be_opened_just_now_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    store = filled(tmp_path, [A])
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
        assert store.get(A.key, A.token_ids) == Miss("missing")
    assert store.stats()["damaged"] == 0
    assert states(tmp_path) == {A.key: "ready"}
    assert same(store.get(A.key, A.token_ids), A)
    store.close()


def test_prefetch_over_a_damaged_record_raises_nothing_and_brings_the_others(tmp_path: Path) -> None:
    filled(tmp_path, [A, B]).close()
    record_of(tmp_path, A.key).write_bytes(b"")
    store = open_store(tmp_path, ram=1 << 20)
    store.prefetch([A.key, C.key, B.key])
    record_of(tmp_path, B.key).unlink()
    assert same(store.get(B.key, B.token_ids), B)
    assert store.get(A.key, A.token_ids) == Miss("damaged")
    store.close()


def test_integrity_check_overlooks_nothing(tmp_path: Path) -> None:
    store = filled(tmp_path, [A, B, C, D])
    assert store.check_integrity() == []
    record_of(tmp_path, A.key).unlink()
    record_of(tmp_path, B.key).write_bytes(b"")
    catalogue = Catalogue.open(tmp_path, IDENTITY)
    catalogue.mark([C.key], "pending")
    catalogue.close()
    problems = store.check_integrity()
    assert sorted(problem.split(":")[0] for problem in problems) == sorted([A.key, B.key, C.key])
    store.close()


def test_integrity_check_does_not_change_which_chunk_leaves_next(tmp_path: Path) -> None:
    chunks = sorted([A, B], key=lambda chunk: chunk.key, reverse=True)
    store = filled(tmp_path, chunks, disk=2 * RECORD)
    store.check_integrity()  # reads in the order of keys
    register(tmp_path, [*chunks, C])
    store.put(C)
    assert states(tmp_path)[chunks[0].key] == "evicted"
    store.close()
