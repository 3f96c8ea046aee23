from __future__ import annotations

from pathlib import Path

import pytest
import torch

from blendrag.store.catalogue import Catalogue
from blendrag.store.record import Miss, Record
from stores import (
    IDENTITY,
    RECORD,
    A,
    B,
    C,
    D,
    files,
    filled,
    get,
    make_chunk,
    open_store,
    problems,
    put,
    record_of,
    register,
    same,
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


@pytest.mark.parametrize("ram", [0, 1 << 20])
def test_kv_changed_after_a_get_does_not_change_the_record(tmp_path: Path, ram: int) -> None:
    store = filled(tmp_path, [A], ram=ram)
    found = get(store, A)
    assert isinstance(found, Record)
    found.decode().zero_()
    assert same(get(store, A), A)


# -- reopening ------------------------------------------------------------------------------------------


def test_files_without_a_row_are_swept_and_rows_without_a_file_wanted_again(tmp_path: Path) -> None:
    filled(tmp_path, [A, B, C]).close()
    record_of(tmp_path, A.key).unlink()
    catalogue = Catalogue.open(tmp_path, IDENTITY)
    catalogue.register("doc", [(chunk.key, "", chunk.token_ids) for chunk in (A, C)])  # B has no row now
    catalogue.mark([C.key], "pending")  # as if the crash came between C's file and its row
    catalogue.close()
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
    catalogue.close()
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


def test_lowered_limit_is_obeyed_from_the_start(tmp_path: Path) -> None:
    filled(tmp_path, [A, B, C]).close()
    open_store(tmp_path, disk=2 * RECORD)
    assert states(tmp_path) == {A.key: "evicted", B.key: "ready", C.key: "ready"}
    assert files(tmp_path) == {f"{B.key}.safetensors", f"{C.key}.safetensors"}
