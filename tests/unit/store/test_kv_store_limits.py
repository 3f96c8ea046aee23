from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import (
    IDENTITY,
    RECORD,
    A,
    B,
    C,
    files,
    filled,
    make_chunk,
    open_store,
    register,
    same,
    states,
)

from blendrag.errors import StoreFullError
from blendrag.store.catalogue import Catalogue
from blendrag.store.chunk import Chunk, Miss
from blendrag.store.disk import DiskTier

# -- limits ---------------------------------------------------------------------------------------------


def test_evicted_chunk_is_not_pending_and_not_in_ram(tmp_path: Path) -> None:
    store = filled(tmp_path, [A, B, C], ram=1 << 20, disk=2 * RECORD)
    assert states(tmp_path) == {A.key: "evicted", B.key: "ready", C.key: "ready"}
    assert store.get(A.key, A.token_ids) == Miss("missing")
    assert states(tmp_path)[A.key] == "evicted"  # asking does not make it wanted
    assert store.stats()["disk"]["evictions"] == 1
    register(tmp_path, [A, B, C])  # ingesting again does
    assert states(tmp_path)[A.key] == "pending"
    assert store.put(A) == A.nbytes
    assert states(tmp_path) == {A.key: "ready", B.key: "evicted", C.key: "ready"}
    store.close()


def test_chunk_answered_from_ram_is_not_the_first_to_leave_the_disk(tmp_path: Path) -> None:
    store = filled(tmp_path, [A, B], ram=1 << 20, disk=2 * RECORD)
    assert same(store.get(A.key, A.token_ids), A)
    register(tmp_path, [A, B, C])
    store.put(C)
    assert states(tmp_path) == {A.key: "ready", B.key: "evicted", C.key: "ready"}
    store.close()


def test_chunk_larger_than_the_limit_drives_nobody_out(tmp_path: Path) -> None:
    large = make_chunk(9, tokens=500)
    store = filled(tmp_path, [A, B], disk=2 * RECORD)
    register(tmp_path, [A, B, large])
    with pytest.raises(StoreFullError, match="limit"):
        store.put(large)
    assert states(tmp_path) == {A.key: "ready", B.key: "ready", large.key: "pending"}
    assert same(store.get(A.key, A.token_ids), A)
    store.close()


def test_chunk_larger_than_ram_is_served_from_disk(tmp_path: Path) -> None:
    store = filled(tmp_path, [A], ram=A.nbytes - 1)
    assert same(store.get(A.key, A.token_ids), A)
    assert store.stats()["ram"]["chunks"] == 0
    store.close()


def test_record_takes_no_more_than_is_counted_for_it(tmp_path: Path) -> None:
    for tokens in (1, 8, 700):
        chunk = make_chunk(1, tokens)
        disk = DiskTier(tmp_path / str(tokens), None)
        disk.put(chunk)
        assert disk.path(chunk.key).stat().st_size <= disk.stats()["bytes"]


POOL = [make_chunk(seed, tokens) for seed, tokens in enumerate([4, 8, 8, 16, 30, 60])]


def disk_size(chunk: Chunk) -> int:
    return chunk.nbytes + 4 * len(chunk.token_ids) + 512


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from(["put", "get"]), st.sampled_from(POOL)), max_size=25),
    st.integers(0, 4000),
    st.integers(0, 6000),
)
def test_no_limit_is_exceeded_and_the_least_recently_used_leaves(
    steps: list[tuple[str, Chunk]], ram: int, limit: int
) -> None:
    with TemporaryDirectory() as folder:
        root = Path(folder)
        register(root, POOL)
        store = open_store(root, ram=ram, disk=limit)
        model: OrderedDict[str, int] = OrderedDict()  # of the disk tier
        in_ram: OrderedDict[str, int] = OrderedDict()

        def keep(chunk: Chunk) -> None:
            if chunk.nbytes <= ram:
                in_ram.pop(chunk.key, None)
                while sum(in_ram.values()) + chunk.nbytes > ram:
                    in_ram.popitem(last=False)
                in_ram[chunk.key] = chunk.nbytes

        for action, chunk in steps:
            size = disk_size(chunk)
            if action == "put" and size > limit:
                with pytest.raises(StoreFullError):
                    store.put(chunk)
            elif action == "put":
                model.pop(chunk.key, None)
                while sum(model.values()) + size > limit:
                    in_ram.pop(model.popitem(last=False)[0], None)
                model[chunk.key] = size
                keep(chunk)
                assert store.put(chunk) == chunk.nbytes
            else:
                found = store.get(chunk.key, chunk.token_ids)
                assert same(found, chunk) if chunk.key in model else found == Miss("missing")
                if chunk.key in model:
                    model.move_to_end(chunk.key)  # whichever tier answered
                if chunk.key in in_ram:
                    in_ram.move_to_end(chunk.key)
                elif chunk.key in model:
                    keep(chunk)
            on_disk = sum(path.stat().st_size for path in (root / "kv").rglob("*.safetensors"))
            stats = store.stats()
            assert on_disk <= stats["disk"]["bytes"] == sum(model.values()) <= limit
            assert stats["ram"]["bytes"] == sum(in_ram.values()) <= ram
            assert files(root) == {f"{key}.safetensors" for key in model}
        assert {key for key, state in states(root).items() if state == "ready"} == set(model)
        store.close()


# -- at once --------------------------------------------------------------------------------------------


def test_chunk_deleted_while_it_is_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path, [], ram=1 << 20)
    register(tmp_path, [A])
    write = DiskTier._write

    def write_slowly(tier: DiskTier, chunk: Chunk) -> None:
        catalogue = Catalogue.open(tmp_path, IDENTITY)  # the client's
        assert catalogue.release("doc") == [A.key]
        catalogue.close()
        write(tier, chunk)

    monkeypatch.setattr(DiskTier, "_write", write_slowly)
    assert store.put(A) == 0
    assert not files(tmp_path)
    assert store.stats()["ram"]["chunks"] == store.stats()["disk"]["chunks"] == 0
    assert store.get(A.key, A.token_ids) == Miss("missing")
    store.close()


def test_chunk_deleted_the_moment_it_is_ready_does_not_stay_in_ram(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path, [], ram=1 << 20)
    register(tmp_path, [A])
    mark_ready = Catalogue.mark_ready

    def then_delete(catalogue: Catalogue, *arguments: Any) -> bool:
        marked = mark_ready(catalogue, *arguments)
        catalogue.release("doc")
        store.delete([A.key])
        return marked

    monkeypatch.setattr(Catalogue, "mark_ready", then_delete)
    store.put(A)
    assert store.get(A.key, A.token_ids) == Miss("missing")
    store.close()


def test_get_that_misses_a_chunk_just_being_written_does_not_unmark_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path, [])
    register(tmp_path, [A])
    get = DiskTier.get

    def then_written(tier: DiskTier, key: str) -> Chunk | None:
        found = get(tier, key)
        store.put(A)  # by the writer's thread, between the look-up and what follows from it
        return found

    monkeypatch.setattr(DiskTier, "get", then_written)
    assert store.get(A.key, A.token_ids) == Miss("missing")
    assert states(tmp_path) == {A.key: "ready"}
    store.close()


def test_delete_counts_and_leaves_nothing(tmp_path: Path) -> None:
    store = filled(tmp_path, [A, B], ram=1 << 20)
    assert store.delete([A.key, C.key]) == 1
    assert files(tmp_path) == {f"{B.key}.safetensors"}
    assert store.stats()["ram"]["chunks"] == 1
    assert store.get(A.key, A.token_ids) == Miss("missing")
    store.close()


def test_threads_never_get_a_torn_or_foreign_chunk(tmp_path: Path) -> None:
    chunks = [make_chunk(seed, tokens=20) for seed in range(12)]
    register(tmp_path, chunks)
    size = disk_size(chunks[0])
    store = open_store(tmp_path, ram=4 * chunks[0].nbytes, disk=6 * size)
    begin = threading.Barrier(6)

    def put(first: int) -> None:
        begin.wait()
        for n in range(24):  # a number, not a time: how long a write takes is up to the disk
            store.put(chunks[(first + n) % 12])

    def read(first: int) -> int:
        begin.wait()
        hits = 0
        at = first
        while not all(writer.done() for writer in writers):
            chunk = chunks[at % 12]
            found = store.get(chunk.key, chunk.token_ids)
            assert found == Miss("missing") or same(found, chunk)
            hits += isinstance(found, Chunk)
            at += 1
        return hits

    with ThreadPoolExecutor(6) as pool:
        writers = [pool.submit(put, first) for first in (0, 5)]
        readers = [pool.submit(read, n) for n in range(4)]
        for writer in writers:
            writer.result()
        assert all(reader.result() > 10 for reader in readers)
    stats = store.stats()
    assert stats["damaged"] == 0
    assert stats["disk"]["bytes"] == size * stats["disk"]["chunks"] == size * len(files(tmp_path)) <= 6 * size
    assert stats["ram"]["bytes"] <= 4 * chunks[0].nbytes
    store.close()
    store = open_store(tmp_path)
    assert store.check_integrity() == []
    store.close()
