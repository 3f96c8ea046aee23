"""Stacks of tiers: what each has after a put, a get, an eviction, a deletion; a shared tier, and a server."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from blendrag.errors import ConfigError, StoreError
from blendrag.store.catalogue import Catalogue
from blendrag.store.record import Layout, Miss, Record
from blendrag.store.replicas import Background
from blendrag.store.tiers import Opened, TierError, TierSpec
from servers import Process, redis_server, running
from stores import (
    IDENTITY,
    RECORD,
    A,
    B,
    C,
    files,
    filled,
    filled_stack,
    get,
    holds,
    make_chunk,
    open_stack,
    problems,
    put,
    record_of,
    register,
    release,
    same,
    shared,
    states,
    wanted,
)

RAM, DISK = TierSpec(kind="ram", bytes=1 << 20), TierSpec(kind="disk")


# -- settings -------------------------------------------------------------------------------------------


def test_stack_that_cannot_be_written_or_has_a_tier_twice_is_refused(tmp_path: Path) -> None:
    never = TierSpec(kind="disk", write="never")
    for stack in ([], [never], [TierSpec(kind="ram", write="never"), never]):
        with pytest.raises(ConfigError, match="may be written"):
            open_stack(tmp_path, *stack)
    with pytest.raises(ConfigError, match="same"):
        open_stack(tmp_path, RAM, DISK, TierSpec(kind="ram", bytes=7))
    twice = shared(tmp_path / "other")
    with pytest.raises(ConfigError, match="same"):
        open_stack(tmp_path, twice, twice)
    open_stack(tmp_path, DISK, twice).close()  # and nothing of that was left open or half made


# -- single tiers ---------------------------------------------------------------------------------------


def test_ram_alone_serves_and_forgets_with_the_process(tmp_path: Path) -> None:
    register(tmp_path, [A, B])
    store = open_stack(tmp_path, RAM)
    assert put(store, A) == put(store, B) == RECORD
    assert same(get(store, A), A) and not (tmp_path / "kv").exists()
    assert set(states(tmp_path).values()) == {"ready"}
    assert store.delete([A.key]) == (1, [])
    assert get(store, A) == Miss("missing")
    store.close()
    store = open_stack(tmp_path, RAM)
    assert set(states(tmp_path).values()) == {"pending"}  # to be ingested again, not believed to be there
    assert get(store, B) == Miss("missing")


def test_chunk_that_leaves_a_ram_of_its_own_is_evicted_not_wanted(tmp_path: Path) -> None:
    store = filled_stack(tmp_path, [A, B], TierSpec(kind="ram", bytes=RECORD))
    assert holds(store, A, B) == [[False, True]]
    assert states(tmp_path) == {A.key: "evicted", B.key: "ready"}


@pytest.mark.parametrize("own_path", [False, True])
def test_disk_alone_serves_over_a_restart(tmp_path: Path, own_path: bool) -> None:
    """In a folder of its own choice, too: eviction, recovery and limits are the same there."""
    path = tmp_path / "elsewhere" if own_path else None
    spec = TierSpec(kind="disk", bytes=2 * RECORD, path=path)
    store = filled_stack(tmp_path, [A, B, C], spec)
    assert states(tmp_path) == {A.key: "evicted", B.key: "ready", C.key: "ready"}
    store.close()
    store = open_stack(tmp_path, spec)
    assert [same(get(store, chunk), chunk) for chunk in (A, B, C)] == [False, True, True]
    (stats,) = store.stats().values()
    assert (stats["chunks"], stats["bytes"]) == (2, 2 * RECORD)


# -- several --------------------------------------------------------------------------------------------


def test_write_goes_to_each_tier_as_its_policy_says(tmp_path: Path) -> None:
    register(tmp_path, [A])
    behind, never = shared(tmp_path / "b", write="behind"), shared(tmp_path / "n")
    open_stack(tmp_path, never).close()  # it has to be there to be read
    store = open_stack(tmp_path, RAM, DISK, behind, shared(tmp_path / "n", write="never"))
    put(store, A)
    store.wait()
    assert holds(store, A) == [[True], [True], [True], [False]]
    assert store.delete([A.key]) == (1, [])
    assert holds(store, A) == [[False]] * 4


def test_get_promotes_at_once_and_the_loaders_path_behind(tmp_path: Path) -> None:
    filled(tmp_path, [A, B]).close()
    store = open_stack(tmp_path, RAM, DISK)
    assert same(get(store, A), A)
    assert holds(store, A, B) == [[True, False], [True, True]]
    (opened,) = store.open_records(wanted(B))
    assert isinstance(opened, Opened) and opened.tier.name == "disk"
    store.close_records([opened])
    assert holds(store, B)[0] == [False]  # the loader hands it over when it has read it
    found = get(store, B)
    store.tiers[0].delete([B.key])
    store.replicas.promote_behind([found], [store.tiers[1]])  # type: ignore[list-item]
    store.wait()
    assert holds(store, B)[0] == [True]
    assert store.stats()["ram"]["promotions"] == 3


def test_chunk_driven_from_home_is_found_below_and_comes_back(tmp_path: Path) -> None:
    home = TierSpec(kind="disk", chunks=1)
    store = filled_stack(tmp_path, [A, B], home, shared(tmp_path / "below"))
    assert holds(store, A, B) == [[False, True], [True, True]]
    assert set(states(tmp_path).values()) == {"ready"}  # it is not lost
    assert same(get(store, A), A)
    assert holds(store, A, B) == [[True, False], [True, True]]
    store.close()
    store = open_stack(tmp_path, home, shared(tmp_path / "below"))
    assert all(same(get(store, chunk), chunk) for chunk in (A, B))


@pytest.mark.parametrize("below", ["there", "damaged at home", "unreachable", "gone"])
def test_chunk_that_a_slower_tier_may_have_is_not_called_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    register(tmp_path, [A, B])
    store = open_stack(tmp_path, TierSpec(kind="disk", chunks=1), shared(tmp_path / "below"))
    put(store, A)
    if below == "damaged at home":
        record_of(tmp_path, A.key).write_bytes(b"damaged")
    else:
        put(store, B)
    if below == "gone":
        store.tiers[1].delete([A.key])

    def cools_down(keys: Sequence[str]) -> dict[str, Opened | Exception]:
        raise TierError("not asked, it failed less than 30 s ago")

    with monkeypatch.context() as patch:
        if below == "unreachable":
            patch.setattr(store.tiers[1], "open", cools_down)
            assert get(store, A) == Miss("unavailable")
        assert store.check([A.key]) == ([A.key] if below == "gone" else [])
    assert states(tmp_path)[A.key] == ("pending" if below == "gone" else "ready")
    assert same(get(store, A), A) == (below != "gone")


@pytest.mark.parametrize("at", [0, -1])
def test_damaged_record_is_served_by_the_next_tier(tmp_path: Path, at: int) -> None:
    store = filled_stack(tmp_path, [A], DISK, shared(tmp_path / "below"))
    data = bytearray(record_of(tmp_path, A.key).read_bytes())
    data[at] ^= 1
    record_of(tmp_path, A.key).write_bytes(data)
    if at:  # its head was sound: this request has lost its time already
        assert get(store, A) == Miss("damaged")
    assert same(get(store, A), A)
    assert problems(tmp_path) == []  # home has it again
    assert states(tmp_path) == {A.key: "ready"}


# -- a sustained stream ---------------------------------------------------------------------------------


def test_stream_of_new_combinations_adds_nothing_and_stays_in_its_ram(tmp_path: Path) -> None:
    """Ten times more chunks than RAM holds: what a question reads is never written for the next one."""
    chunks = [make_chunk(seed) for seed in range(100)]
    filled(tmp_path, chunks).close()
    store = open_stack(tmp_path, TierSpec(kind="ram", bytes=10 * RECORD), DISK)
    stored = {path: path.stat().st_mtime_ns for path in (tmp_path / "kv").rglob("*")}
    choice = random.Random(0)
    for _ in range(60):
        picked = choice.sample(chunks, 6)
        opened = store.open_records(wanted(*picked))
        assert all(isinstance(one, Opened) for one in opened)
        store.close_records(opened)
        for chunk in picked:
            assert same(get(store, chunk), chunk)
        stats = store.stats()
        assert stats["ram"]["bytes"] == stats["ram"]["chunks"] * RECORD <= 10 * RECORD
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "kv").rglob("*")} == stored
    assert (stats["disk"]["puts"], stats["disk"]["evictions"], stats["disk"]["chunks"]) == (0, 0, 100)
    assert stats["ram"]["evictions"] >= 200
    store.close()
    assert problems(tmp_path) == []


def test_store_in_a_place_that_is_no_folder_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        open_stack(tmp_path / "file", DISK)
    with pytest.raises(StoreError, match="file"):
        open_stack(tmp_path / "index", shared(tmp_path / "file"))


# -- a tier that several stores use ---------------------------------------------------------------------


def test_two_stores_reuse_each_others_chunks_over_a_shared_tier(tmp_path: Path) -> None:
    common = shared(tmp_path / "common", write="behind")
    one, two = tmp_path / "one", tmp_path / "two"
    for root in (one, two):
        register(root, [A, B])
    first = open_stack(one, RAM, DISK, common)
    put(first, A)
    first.wait()
    second = open_stack(two, RAM, DISK, common)
    assert second.adopt(wanted(A, B, C)) == {A.key}  # B nobody has, C nobody knows
    assert states(two) == {A.key: "ready", B.key: "pending"}
    assert files(two) == {f"{A.key}.safetensors"}
    assert second.adopt([(B.key, A.token_ids)]) == set()
    first.close()
    assert same(get(second, A), A)
    second.close()
    assert problems(one) == problems(two) == []


def test_half_of_a_chunk_is_not_adopted_for_the_whole(tmp_path: Path) -> None:
    common = shared(tmp_path / "common")
    filled_stack(tmp_path / "one", [A], DISK, common).close()
    register(tmp_path / "two", [A])
    store = open_stack(tmp_path / "two", DISK, common)
    assert store.adopt([(A.key, A.token_ids[:4])]) == set()
    assert states(tmp_path / "two") == {A.key: "pending"}


def test_tier_that_is_only_read_is_never_changed(tmp_path: Path) -> None:
    """Not even for a damaged record, or one that was deleted here."""
    library = tmp_path / "library"
    filled_stack(tmp_path / "one", [A, B], shared(library)).close()
    (bad,) = library.rglob(f"{B.key}.safetensors")
    bad.write_bytes(b"damaged")
    before = {path: path.stat().st_mtime_ns for path in library.rglob("*")}
    register(tmp_path / "two", [A, B])
    store = open_stack(tmp_path / "two", RAM, DISK, shared(library, write="never"))
    assert same(get(store, A), A)
    assert holds(store, A) == [[True], [True], [True]]  # home has it, too, from now on
    assert get(store, B) == Miss("damaged")
    assert store.delete([A.key, B.key]) == (1, [])
    assert holds(store, A)[0] == [False]
    store.close()
    assert {path: path.stat().st_mtime_ns for path in library.rglob("*")} == before


def test_namespaces_do_not_get_each_others_kv_even_with_equal_text(tmp_path: Path) -> None:
    common = shared(tmp_path / "common")
    tenants = {name: replace(IDENTITY, namespace=name) for name in ("a", "b")}
    chunks = {name: make_chunk(1, identity=identity) for name, identity in tenants.items()}
    assert chunks["a"].token_ids == chunks["b"].token_ids
    assert chunks["a"].key != chunks["b"].key
    opened = {}
    for name, identity in tenants.items():
        catalogue = Catalogue.open(tmp_path / name, identity)
        catalogue.register("doc", [(chunk.key, "", chunk.token_ids) for chunk in chunks.values()])
        opened[name] = open_stack(tmp_path / name, DISK, common, identity=identity)
    put(opened["a"], chunks["a"])
    for key in (chunks["a"].key, chunks["b"].key):  # even if b learns a's key
        assert opened["b"].get(key, chunks["b"].token_ids) == Miss("missing")
        assert opened["b"].adopt([(key, chunks["b"].token_ids)]) == set()
    (record,) = (tmp_path / "common").rglob("*.safetensors")
    for key in (chunks["a"].key, chunks["b"].key):  # nor if it is copied over to b's folder
        theirs = tmp_path / "common" / Layout(tenants["b"], "bfloat16").digest / key[:2]
        theirs.mkdir(exist_ok=True)
        (theirs / f"{key}.safetensors").write_bytes(record.read_bytes())
        assert opened["b"].get(key, chunks["b"].token_ids) == Miss("damaged")
    for store in opened.values():
        store.close()


# -- deletion and eviction over a server that comes and goes: nothing stays that should be gone -------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Process]:
    with running(redis_server(tmp_path)) as process:
        yield process


def redis_tier(server: Process, **options: object) -> TierSpec:
    url = f"redis://127.0.0.1:{server.port}"
    return TierSpec.model_validate(
        {"kind": "redis", "url": url, "timeout_s": 10, "cooldown_s": 0.1, **options}
    )


def test_deletion_everywhere_changes_nothing_here_while_a_server_is_away(
    tmp_path: Path, server: Process
) -> None:
    store = filled_stack(tmp_path, [A], RAM, DISK, redis_tier(server))
    store.wait()
    server.kill()
    assert store.delete([A.key], everywhere=True) == (0, ["redis"])
    assert states(tmp_path) == {A.key: "ready"} and store.tiers[1].has([A.key])


def test_chunk_deleted_while_its_server_was_away_leaves_it_at_the_next_opening(
    tmp_path: Path, server: Process
) -> None:
    store = filled_stack(tmp_path, [A], DISK, redis_tier(server, expire_s=600))
    store.wait()
    assert holds(store, A) == [[True], [True]]
    store.close()
    assert release(tmp_path) == [A.key]  # with no engine running, or while the server cannot be reached
    store = open_stack(tmp_path, DISK, redis_tier(server))
    assert holds(store, A) == [[False], [False]]


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
