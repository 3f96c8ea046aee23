from __future__ import annotations

import errno
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.store.catalogue import Catalogue
from blendrag.store.kv_reader import read_whole
from blendrag.store.record import DamagedError, Miss
from blendrag.store.tiers import Opened
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
    with record_of(tmp_path, C.key).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    assert store.check([A.key, B.key, C.key]) == [B.key, C.key]
    assert states(tmp_path) == {A.key: "ready", B.key: "pending", C.key: "pending"}
    assert quarantined(tmp_path)


def test_another_chunks_record_under_this_name_is_dropped(tmp_path: Path) -> None:
    store = filled(tmp_path, [A, B])
    record_of(tmp_path, A.key).write_bytes(record_of(tmp_path, B.key).read_bytes())
    assert store.get(A.key, B.token_ids) == Miss("damaged")  # even when asked for what is in the file
    assert quarantined(tmp_path) == {f"{A.key}.safetensors"}
    assert states(tmp_path) == {A.key: "pending", B.key: "ready"}
    assert same(get(store, B), B)


def test_deleted_record_is_wanted_again(tmp_path: Path) -> None:
    store = filled(tmp_path, [A])
    record_of(tmp_path, A.key).unlink()
    assert get(store, A) == Miss("missing")
    assert states(tmp_path) == {A.key: "pending"}
    assert store.stats()["disk"]["bytes"] == 0
    assert put(store, A) == size(A)


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
    catalogue.close()
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
