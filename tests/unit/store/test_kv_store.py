from __future__ import annotations

import errno
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendrag.store.catalogue import Catalogue
from blendrag.store.kv_reader import read_whole
from blendrag.store.record import DamagedError, Miss
from blendrag.store.tiers import Opened
from closed import flip
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
    get,
    gone,
    make_chunk,
    make_record,
    open_store,
    problems,
    put,
    quarantined,
    record_of,
    register,
    same,
    size,
    states,
)

# -- what comes back ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ram", [0, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kv_does_not_lose_a_bit(tmp_path: Path, dtype: torch.dtype, ram: int) -> None:
    chunk = make_chunk(1, tokens=7, dtype=dtype)
    chunk.kv.view(-1)[:4] = torch.tensor([float("nan"), float("-inf"), -0.0, 1e-40]).to(dtype)
    name = str(dtype).removeprefix("torch.")
    store = filled(tmp_path, [chunk], ram=ram, dtype=name)
    assert same(get(store, chunk), chunk)
    store.close()
    store = open_store(tmp_path, ram=ram, dtype=name)
    assert same(get(store, chunk), chunk)
    assert same(get(store, chunk), chunk)  # from RAM, where there is some


def test_prefix_of_a_chunk_is_found_and_the_whole_chunk_given(tmp_path: Path) -> None:
    store = filled(tmp_path, [A])
    for length in range(len(A.token_ids) + 1):
        assert same(store.get(A.key, A.token_ids[:length]), A)
    assert same(store.get(A.key, list(A.token_ids)), A)  # requests carry lists


@pytest.mark.parametrize("ram", [0, 1 << 20])
@pytest.mark.parametrize("ids", [(*A.token_ids[:-1], 1), (*A.token_ids, 1), A.token_ids[1:], B.token_ids])
def test_kv_of_other_tokens_is_never_given(tmp_path: Path, ids: tuple[int, ...], ram: int) -> None:
    store = filled(tmp_path, [A], ram=ram)
    assert store.get(A.key, ids) == Miss("mismatch")
    assert same(get(store, A), A)  # and the chunk is not blamed for it
    assert states(tmp_path) == {A.key: "ready"}


def test_chunk_never_stored_is_missing_and_stays_pending(tmp_path: Path) -> None:
    store = filled(tmp_path, [])
    register(tmp_path, [A])
    assert get(store, A) == Miss("missing")
    assert get(store, B) == Miss("missing")
    assert states(tmp_path) == {A.key: "pending"}


def test_chunk_nobody_wants_is_not_written(tmp_path: Path) -> None:
    store = filled(tmp_path, [], ram=1 << 20)
    assert put(store, A) == 0
    assert not files(tmp_path)
    assert store.stats()["ram"]["chunks"] == 0


# -- reopening ------------------------------------------------------------------------------------------


def test_files_without_a_row_are_swept_and_rows_without_a_file_wanted_again(tmp_path: Path) -> None:
    filled(tmp_path, [A, B, C]).close()
    record_of(tmp_path, A.key).unlink()
    catalogue = Catalogue.open(tmp_path, IDENTITY)
    catalogue.register("doc", [(chunk.key, "", chunk.token_ids) for chunk in (A, C)])  # B has no row now
    catalogue.mark([C.key], "pending")  # as if the crash came between C's file and its row
    (tmp_path / "kv" / "tmp" / f"{C.key}.1.1").write_bytes(b"half")
    store = open_store(tmp_path)
    assert states(tmp_path)[C.key] == "ready"
    assert files(tmp_path) == {f"{C.key}.safetensors"}
    assert problems(tmp_path) == [f"{A.key}: no file"]  # no crash does that: it is found out when asked for
    assert get(store, A) == Miss("missing")
    assert states(tmp_path) == {A.key: "pending", C.key: "ready"}
    assert problems(tmp_path) == []


def test_file_that_a_crash_left_unnoted_is_room_for_others(tmp_path: Path) -> None:
    """Where an eviction was interrupted, too, which is finished first."""
    filled(tmp_path, [A, B, C]).close()
    catalogue = Catalogue.open(tmp_path, IDENTITY)
    catalogue.evict([A.key])
    catalogue.mark([C.key], "pending")
    store = open_store(tmp_path, disk=2 * RECORD)
    register(tmp_path, [A, B, C, D])
    put(store, D)
    assert len(files(tmp_path)) == 2


def test_order_of_use_is_not_forgotten_over_a_restart(tmp_path: Path) -> None:
    store = filled(tmp_path, [A, B, C])
    for chunk in (B, A):
        get(store, chunk)
    store.close()
    store = open_store(tmp_path, disk=3 * RECORD)
    register(tmp_path, [A, B, C, D])
    put(store, D)
    assert states(tmp_path) == {A.key: "ready", B.key: "ready", C.key: "evicted", D.key: "ready"}


def test_chunk_just_written_does_not_leave_first_after_a_restart(tmp_path: Path) -> None:
    store = filled(tmp_path, [A])
    get(store, A)
    register(tmp_path, [A, B])
    put(store, B)  # later than the use of A
    store.close()
    store = open_store(tmp_path, disk=2 * RECORD)
    register(tmp_path, [A, B, C])
    put(store, C)
    assert states(tmp_path) == {A.key: "evicted", B.key: "ready", C.key: "ready"}


# -- damage ---------------------------------------------------------------------------------------------


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
        assert get(store, A) == Miss("damaged")
        assert gone(root, A)
        assert store.stats()["disk"]["damaged"] == 1
        assert get(store, A) == Miss("missing")
        assert put(store, A) == size(A)
        assert same(get(store, A), A)
        store.close()


def test_no_flipped_bit_of_a_head_is_believed() -> None:
    record = make_record(A)
    head = record.head.bytes()
    for bit in range(8 * len(head)):
        flipped = bytearray(head)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedError):
            parsed = LAYOUT.parse(A.key, bytes(flipped), record.head.nbytes)
            assert not isinstance(parsed, int)
            parsed.verify(0, record.rows)


@pytest.mark.parametrize("left", [0, 4, 8, 100, 1024, 1030, RECORD - 1, RECORD + 1])
def test_record_of_another_length_is_dropped_and_wanted_again(tmp_path: Path, left: int) -> None:
    store = filled(tmp_path, [A])
    file = record_of(tmp_path, A.key)
    os.truncate(file, left)
    assert get(store, A) == Miss("damaged")
    assert gone(tmp_path, A)
    assert store.stats()["disk"]["damaged"] == 1


def test_record_cut_off_after_it_was_opened_is_dropped(tmp_path: Path) -> None:
    """A mapped file would kill the process here."""
    store = filled(tmp_path, [A])
    (opened,) = store.open_records([(A.key, A.token_ids)])
    assert isinstance(opened, Opened)
    os.truncate(record_of(tmp_path, A.key), RECORD - 1)
    with pytest.raises(DamagedError, match="cut off"):
        read_whole(opened)
    store.close_records([opened])
    store.damaged(opened.tier.name, A.key)
    assert gone(tmp_path, A)


def test_owner_finds_what_a_reader_could_not_use(tmp_path: Path) -> None:
    """It has a sound copy in RAM."""
    store = filled(tmp_path, [A, B, C], ram=1 << 20)
    record_of(tmp_path, B.key).unlink()
    flip(record_of(tmp_path, C.key), -1)
    assert store.check([A.key, B.key, C.key]) == [B.key, C.key]
    assert states(tmp_path) == {A.key: "ready", B.key: "pending", C.key: "pending"}
    assert quarantined(tmp_path)


def test_record_that_cannot_be_opened_just_now_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    store = filled(tmp_path, [A])
    with monkeypatch.context() as patch:
        patch.setattr("blendrag.store.tiers.disk.os.open", fail)
        assert get(store, A) == Miss("unavailable")
    assert (store.stats()["disk"]["damaged"], store.stats()["disk"]["errors"]) == (0, 1)
    assert states(tmp_path) == {A.key: "ready"}
    assert same(get(store, A), A)


def test_prefetch_over_a_damaged_record_raises_nothing_and_brings_the_others(tmp_path: Path) -> None:
    filled(tmp_path, [A, B]).close()
    record_of(tmp_path, A.key).write_bytes(b"")
    store = open_store(tmp_path, ram=1 << 20)
    for chunk in (A, C, B):
        store.prefetch(chunk.key)
    record_of(tmp_path, B.key).unlink()
    assert same(get(store, B), B)
    assert get(store, A) == Miss("missing")
    assert (store.stats()["disk"]["damaged"], store.stats()["ram"]["promotions"]) == (1, 1)
    assert states(tmp_path) == {A.key: "pending", B.key: "ready"}


def test_check_that_these_tests_rely_on_overlooks_nothing(tmp_path: Path) -> None:
    filled(tmp_path, [A, B, C, D])
    assert problems(tmp_path) == []
    record_of(tmp_path, A.key).unlink()
    record_of(tmp_path, B.key).write_bytes(b"")
    catalogue = Catalogue.open(tmp_path, IDENTITY)
    catalogue.mark([C.key], "pending")
    (tmp_path / "kv" / "tmp" / "half").write_bytes(b"")
    found = [line.split(":")[0] for line in problems(tmp_path)]
    assert sorted(found) == sorted([A.key, B.key, C.key, "half"])


def test_looking_around_does_not_change_which_chunk_leaves_next(tmp_path: Path) -> None:
    store = filled(tmp_path, [A, B], disk=2 * RECORD)
    store.stats()
    store.tiers[-1].has([A.key])
    assert problems(tmp_path) == []
    register(tmp_path, [A, B, C])
    put(store, C)
    assert states(tmp_path)[A.key] == "evicted"


# -- what is put aside ----------------------------------------------------------------------------------


def test_quarantine_keeps_the_latest_and_does_not_grow(tmp_path: Path) -> None:
    chunks = [make_chunk(seed) for seed in range(20)]
    store = filled(tmp_path, chunks)
    for number, chunk in enumerate(chunks, 1):
        record_of(tmp_path, chunk.key).write_bytes(b"damaged")
        assert get(store, chunk) == Miss("damaged")
        kept = chunks[max(0, number - 16) : number]
        assert quarantined(tmp_path) == {f"{one.key}.safetensors" for one in kept}
    assert store.stats()["disk"]["damaged"] == 20


def test_deleted_document_does_not_survive_in_quarantine(tmp_path: Path) -> None:
    store = filled(tmp_path, [A])
    record_of(tmp_path, A.key).write_bytes(b"damaged")
    assert get(store, A) == Miss("damaged")
    store.delete([A.key])
    assert not files(tmp_path) and not quarantined(tmp_path)
