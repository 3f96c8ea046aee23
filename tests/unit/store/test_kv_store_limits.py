from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.errors import StoreFullError
from blendrag.eviction import POLICIES
from blendrag.store.catalogue import Catalogue
from blendrag.store.record import Miss, Record
from blendrag.store.tiers import DiskTier, Opened, TierSpec
from stores import (
    RECORD,
    A,
    B,
    C,
    Chunk,
    ask,
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
    quarantined,
    record_of,
    register,
    release,
    same,
    size,
    states,
)

# -- limits ---------------------------------------------------------------------------------------------


def test_evicted_chunk_is_not_pending_and_not_in_ram(tmp_path: Path) -> None:
    store = filled(tmp_path, [A, B, C], ram=1 << 20, disk=2 * RECORD)
    assert states(tmp_path) == {A.key: "evicted", B.key: "ready", C.key: "ready"}
    assert get(store, A) == Miss("missing")
    assert states(tmp_path)[A.key] == "evicted"  # asking does not make it wanted
    assert store.stats()["disk"]["evictions"] == 1
    register(tmp_path, [A, B, C])  # ingesting again does
    assert states(tmp_path)[A.key] == "pending"
    assert put(store, A) == size(A)
    assert states(tmp_path) == {A.key: "ready", B.key: "evicted", C.key: "ready"}


@pytest.mark.parametrize("tokens", [1, 8, 700])
def test_record_takes_what_is_counted_for_it(tmp_path: Path, tokens: int) -> None:
    chunk = make_chunk(1, tokens)
    store = filled(tmp_path, [chunk], ram=1 << 20)
    stats = store.stats()
    assert record_of(tmp_path, chunk.key).stat().st_size == stats["disk"]["bytes"] == stats["ram"]["bytes"]


def test_count_limits_are_obeyed(tmp_path: Path) -> None:
    store = filled_stack(tmp_path, [A, B, C], TierSpec(kind="ram", chunks=1), TierSpec(kind="disk", chunks=2))
    stats = store.stats()
    assert [stats[name]["chunks"] for name in ("ram", "disk")] == [1, 2]
    assert [stats[name]["evictions"] for name in ("ram", "disk")] == [2, 1]
    assert states(tmp_path) == {A.key: "evicted", B.key: "ready", C.key: "ready"}
    store.close()
    store = open_stack(tmp_path, TierSpec(kind="ram", chunks=0), TierSpec(kind="disk", chunks=1))
    assert files(tmp_path) == {f"{C.key}.safetensors"}  # lowered since
    assert states(tmp_path) == {A.key: "evicted", B.key: "evicted", C.key: "ready"}
    assert same(get(store, C), C)
    assert store.stats()["ram"]["chunks"] == 0
    with pytest.raises(StoreFullError):
        store.tiers[0].put(make_record(C))


POOL = [make_chunk(seed, tokens) for seed, tokens in enumerate([4, 8, 8, 16, 30, 60])]
STEPS = st.lists(st.tuples(st.sampled_from(["put", "ask", "get"]), st.sampled_from(POOL)), max_size=25)


@given(STEPS, st.integers(0, 6000), st.integers(0, 10_000))
def test_lru_gives_up_the_least_recently_used(steps: list[tuple[str, Chunk]], ram: int, limit: int) -> None:
    with TemporaryDirectory() as folder:
        root = Path(folder)
        register(root, POOL)
        store = open_store(root, ram=ram, disk=limit, policy="lru")
        model: OrderedDict[str, int] = OrderedDict()  # of the disk tier
        in_ram: OrderedDict[str, int] = OrderedDict()

        def keep(chunk: Chunk) -> None:
            if size(chunk) <= ram:
                in_ram.pop(chunk.key, None)
                while sum(in_ram.values()) + size(chunk) > ram:
                    in_ram.popitem(last=False)
                in_ram[chunk.key] = size(chunk)

        for action, chunk in steps:
            needed = size(chunk)
            if action == "put" and needed > limit:
                with pytest.raises(StoreFullError, match="more than the disk tier may hold"):
                    put(store, chunk)
            elif action == "put":
                model.pop(chunk.key, None)
                while sum(model.values()) + needed > limit:
                    in_ram.pop(model.popitem(last=False)[0], None)
                model[chunk.key] = needed
                keep(chunk)
                assert put(store, chunk) == size(chunk)
            else:
                if action == "ask":
                    ask(store, chunk)
                    for held in (model, in_ram):  # whichever tier answered
                        if chunk.key in held:
                            held.move_to_end(chunk.key)
                else:  # to read ahead, say: nothing was used
                    found = get(store, chunk)
                    assert same(found, chunk) if chunk.key in model else found == Miss("missing")
                if chunk.key in model and chunk.key not in in_ram:
                    keep(chunk)
            on_disk = sum(path.stat().st_size for path in (root / "kv").rglob("*.safetensors"))
            stats = store.stats()
            assert on_disk == stats["disk"]["bytes"] == sum(model.values()) <= limit
            assert stats["ram"]["bytes"] == sum(in_ram.values()) <= ram
            assert files(root) == {f"{key}.safetensors" for key in model}
        assert {key for key, state in states(root).items() if state == "ready"} == set(model)
        store.close()


@given(STEPS, st.integers(0, 6000), st.integers(0, 10_000), st.sampled_from(sorted(POLICIES)))
def test_limit_is_kept_and_the_catalogue_knows_who_left(
    steps: list[tuple[str, Chunk]], ram: int, limit: int, policy: str
) -> None:
    """Whoever it is that a policy gives up."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        register(root, POOL)
        store = open_store(root, ram=ram, disk=limit, policy=policy)
        for action, chunk in steps:
            if action == "put" and size(chunk) > limit:
                with pytest.raises(StoreFullError):
                    put(store, chunk)
            elif action == "put":
                assert put(store, chunk) == size(chunk), "there is room once others have left"
            elif action == "ask":
                ask(store, chunk)
            else:
                get(store, chunk)
            on_disk = sum(path.stat().st_size for path in (root / "kv").rglob("*.safetensors"))
            stats = store.stats()
            assert on_disk == stats["disk"]["bytes"] <= limit and stats["ram"]["bytes"] <= ram
            ready = {key for key, state in states(root).items() if state == "ready"}
            assert files(root) == {f"{key}.safetensors" for key in ready}
            in_ram, _ = holds(store, *POOL)
            assert {one.key for one, there in zip(POOL, in_ram, strict=True) if there} <= ready
        store.close()


# -- at once --------------------------------------------------------------------------------------------


def test_chunk_deleted_while_it_is_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path, [], ram=1 << 20)
    register(tmp_path, [A])
    write = DiskTier._write

    def write_slowly(tier: DiskTier, record: Record) -> None:
        assert release(tmp_path) == [A.key]
        write(tier, record)

    monkeypatch.setattr(DiskTier, "_write", write_slowly)
    assert put(store, A) == 0
    assert not files(tmp_path)
    assert store.stats()["ram"]["chunks"] == store.stats()["disk"]["chunks"] == 0
    assert get(store, A) == Miss("missing")


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
    put(store, A)
    assert get(store, A) == Miss("missing")


def test_get_that_misses_a_chunk_just_being_written_does_not_unmark_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path, [])
    register(tmp_path, [A])
    look = DiskTier.open

    def then_written(tier: DiskTier, keys: Sequence[str]) -> Mapping[str, Opened | Exception]:
        found = look(tier, keys)
        put(store, A)  # by the writer's thread, between the look-up and what follows from it
        return found

    monkeypatch.setattr(DiskTier, "open", then_written)
    assert get(store, A) == Miss("missing")
    assert states(tmp_path) == {A.key: "ready"}


def test_delete_counts_and_leaves_nothing(tmp_path: Path) -> None:
    store = filled(tmp_path, [A, B], ram=1 << 20)
    assert store.delete([A.key, C.key]) == (1, [])
    assert files(tmp_path) == {f"{B.key}.safetensors"}
    assert store.stats()["ram"]["chunks"] == 1
    assert get(store, A) == Miss("missing")


def test_threads_never_get_a_torn_or_foreign_chunk(tmp_path: Path) -> None:
    chunks = [make_chunk(seed, tokens=20) for seed in range(12)]
    register(tmp_path, chunks)
    each = size(chunks[0])
    store = open_store(tmp_path, ram=4 * each, disk=6 * each)
    begin = threading.Barrier(6)

    def write(first: int) -> None:
        begin.wait()
        for n in range(24):  # a number, not a time: how long a write takes is up to the disk
            put(store, chunks[(first + n) % 12])

    def read(first: int) -> int:
        begin.wait()
        hits = 0
        at = first
        while not all(writer.done() for writer in writers):
            chunk = chunks[at % 12]
            found = get(store, chunk)
            assert found == Miss("missing") or same(found, chunk)
            hits += isinstance(found, Record)
            at += 1
        return hits

    with ThreadPoolExecutor(6) as pool:
        writers = [pool.submit(write, first) for first in (0, 5)]
        readers = [pool.submit(read, n) for n in range(4)]
        for writer in writers:
            writer.result()
        assert all(reader.result() > 10 for reader in readers)
    stats = store.stats()
    assert stats["disk"]["damaged"] == 0 and not quarantined(tmp_path)
    assert stats["disk"]["bytes"] == each * stats["disk"]["chunks"] == each * len(files(tmp_path)) <= 6 * each
    assert stats["ram"]["bytes"] <= 4 * each
    store.close()
    assert problems(tmp_path) == []
