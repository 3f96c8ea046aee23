"""Deletion and eviction over a stack with a server that comes and goes: nothing stays that should be gone,
and nothing is called stored that is nowhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from blendrag.store.catalogue import Catalogue
from blendrag.store.kv_store import KVStore
from blendrag.store.record import Miss, Record
from blendrag.store.replicas import Background
from blendrag.store.tiers import TierSpec
from servers import Process, redis_server, running
from stores import (
    IDENTITY,
    A,
    B,
    filled_stack,
    get,
    holds,
    open_stack,
    put,
    register,
    release,
    same,
    shared,
    states,
    wanted,
)

RAM, DISK = TierSpec(kind="ram", bytes=1 << 20), TierSpec(kind="disk")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Process]:
    with running(redis_server(tmp_path)) as process:
        yield process


def redis_tier(server: Process, **options: object) -> TierSpec:
    url = f"redis://127.0.0.1:{server.port}"
    return TierSpec.model_validate(
        {"kind": "redis", "url": url, "timeout_s": 10, "cooldown_s": 0.1, **options}
    )


def in_tier(store: KVStore, name: str, key: str) -> bool:
    (tier,) = [tier for tier in store.tiers if tier.name == name]
    return bool(tier.has([key]))


def test_deletion_everywhere_changes_nothing_here_while_a_server_is_away(
    tmp_path: Path, server: Process
) -> None:
    store = filled_stack(tmp_path, [A], RAM, DISK, redis_tier(server))
    store.wait()
    server.kill()
    assert store.delete([A.key], everywhere=True) == (0, ["redis"])
    assert states(tmp_path) == {A.key: "ready"} and in_tier(store, "disk", A.key)


def test_chunk_deleted_while_its_server_was_away_leaves_it_at_the_next_opening(
    tmp_path: Path, server: Process
) -> None:
    store = filled_stack(tmp_path, [A], DISK, redis_tier(server, expire_s=600))
    store.wait()
    assert in_tier(store, "redis", A.key)
    store.close()
    assert release(tmp_path) == [A.key]  # with no engine running, or while the server cannot be reached
    store = open_stack(tmp_path, DISK, redis_tier(server))
    assert not in_tier(store, "redis", A.key) and not in_tier(store, "disk", A.key)


@pytest.mark.parametrize("released", [True, False])
def test_copy_that_was_still_waiting_does_not_outlive_its_chunk(
    tmp_path: Path, server: Process, released: bool
) -> None:
    register(tmp_path, [A, B])
    store, gate = open_stack(tmp_path, DISK, redis_tier(server)), threading.Event()
    store.replicas._behind.do(gate.wait)  # the server is busy with something else
    put(store, A, B)
    if released:
        release(tmp_path)
    store.delete([A.key, B.key])  # a purge deletes first, and releases then
    gate.set()
    store.wait()
    assert holds(store, A, B) == [[False, False], [False, False]]
    put(store, A)  # ingested again, it is welcome
    store.wait()
    assert holds(store, A) == [[not released], [not released]]


def test_evicted_chunk_is_not_called_ready_if_no_slower_tier_has_it(tmp_path: Path, server: Process) -> None:
    register(tmp_path, [A, B])
    server.kill()
    store = open_stack(tmp_path, TierSpec(kind="disk", chunks=1), redis_tier(server))
    put(store, A, B)
    store.wait()
    assert states(tmp_path) == {A.key: "evicted", B.key: "ready"}


def test_without_ram_what_a_server_had_is_kept_on_disk(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for root in (first, second):
        register(root, [A])
    store = open_stack(first, DISK, shared(tmp_path / "shared", write="through"))
    put(store, A)
    store.close()
    store = open_stack(second, DISK, shared(tmp_path / "shared"))
    (opened,) = store.open_records(wanted(A))
    assert not isinstance(opened, Miss) and store.replicas.wants(opened)
    store.close_records([opened])
    assert same(get(store, A), A)
    assert holds(store, A) == [[True], [True]]
    (opened,) = store.open_records(wanted(A))
    assert not isinstance(opened, Miss) and not store.replicas.wants(opened)
    store.close_records([opened])


def test_only_prompts_count_as_uses(tmp_path: Path) -> None:
    store = filled_stack(tmp_path, [A], RAM, DISK)
    assert isinstance(get(store, A), Record)
    store.prefetch(A.key)
    for _ in range(3):
        store.close_records(store.open_records(wanted(A), use=True))
    store.close()
    catalogue = Catalogue.open(tmp_path, IDENTITY)
    (reuse,) = catalogue.reuse(10)
    assert (reuse.chunks, reuse.uses) == (1, 3)


def test_waiting_copies_keep_no_more_than_their_share_of_memory() -> None:
    background, gate = Background("test", most=100), threading.Event()
    done: list[str] = []
    background.do(gate.wait, 60)
    assert background.do_if_room(lambda: done.append("fits"), 40)
    assert not background.do_if_room(lambda: done.append("does not"), 1)
    waiter = threading.Thread(target=background.do, args=(lambda: done.append("waited"), 100))
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive() and not done
    gate.set()
    waiter.join(10)
    background.close()
    assert done == ["fits", "waited"]
