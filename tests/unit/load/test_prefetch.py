from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from blendrag.load.prefetch import Prefetcher
from blendrag.store.kv_store import KVStore
from stores import A, B, C, D, filled, holds, open_store, record_of, wanted
from waiting import until


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    """Four chunks on disk, none of them in RAM."""
    filled(tmp_path, [A, B, C, D]).close()
    opened = open_store(tmp_path, ram=1 << 20)
    yield opened
    opened.close()


class Gate:
    """Holds the reading of a store's chunks until it is opened for one or all of them."""

    def __init__(self, store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self._may = threading.Semaphore(0)
        prefetch = store.prefetch

        def held(key: str) -> None:
            self.begun.append(key)
            assert self._may.acquire(timeout=30)
            prefetch(key)

        monkeypatch.setattr(store, "prefetch", held)

    def open(self, times: int = 100) -> None:
        self._may.release(times)

    def wait_for(self, key: str) -> None:
        until(lambda: self.begun[-1:] == [key])


@pytest.fixture
def gate(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(store, monkeypatch)


@pytest.fixture
def prefetcher(store: KVStore) -> Iterator[Prefetcher]:
    made = Prefetcher(store)
    yield made
    made.close()


def counts(prefetcher: Prefetcher) -> tuple[int, int, int]:
    stats = prefetcher.stats()
    return stats["asked"], stats["read"], stats["cancelled"]


def in_ram(store: KVStore) -> list[bool]:
    return holds(store, A, B, C, D)[0]


def test_chunks_come_into_ram_in_the_retrievers_order_each_once(
    store: KVStore, gate: Gate, prefetcher: Prefetcher
) -> None:
    gate.open()
    prefetcher.begin([C.key, A.key, C.key, "unknown"])
    until(lambda: counts(prefetcher) == (3, 3, 0))
    assert gate.begun == [C.key, A.key, "unknown"]
    assert in_ram(store) == [True, False, True, False]
    assert {one.tier.name for one in store.open_records(wanted(A, C))} == {"ram"}  # type: ignore[union-attr]


def test_what_the_prompt_goes_without_is_not_read(store: KVStore, gate: Gate, prefetcher: Prefetcher) -> None:
    prefetcher.begin([A.key, B.key, C.key])
    gate.wait_for(A.key)
    with ThreadPoolExecutor(1) as pool:
        arrived = pool.submit(prefetcher.arrived, [A.key, B.key])
        until(lambda: counts(prefetcher)[2] == 2)
        time.sleep(0.005)
        assert not arrived.done()  # A is being read for this prompt
        gate.open()
        arrived.result(timeout=30)
    assert in_ram(store) == [True, False, False, False]  # B is the loader's, which may have begun with it
    assert (gate.begun, counts(prefetcher)) == ([A.key], (3, 1, 2))


def test_chunk_read_for_nobody_is_not_waited_for(store: KVStore, gate: Gate, prefetcher: Prefetcher) -> None:
    prefetcher.begin([A.key, B.key])
    gate.wait_for(A.key)
    prefetcher.arrived([B.key])  # returns while A is still being read
    assert counts(prefetcher) == (2, 0, 1)
    gate.open()
    until(lambda: counts(prefetcher) == (2, 1, 1))


def test_prompt_of_one_retrieval_does_not_cancel_anothers(
    store: KVStore, gate: Gate, prefetcher: Prefetcher
) -> None:
    prefetcher.begin([A.key, B.key])
    prefetcher.begin([C.key, D.key])
    gate.wait_for(A.key)
    gate.open()
    prefetcher.arrived([A.key])
    prefetcher.arrived(["of no retrieval"])
    until(lambda: in_ram(store)[2:] == [True, True])
    assert counts(prefetcher)[0] == 4


def test_prompt_that_never_comes_stops_the_reading(store: KVStore, gate: Gate) -> None:
    prefetcher = Prefetcher(store, expire_s=0.05)
    prefetcher.begin([A.key, B.key, C.key])
    gate.wait_for(A.key)
    time.sleep(0.1)
    gate.open()
    until(lambda: counts(prefetcher) == (3, 1, 2))
    assert (gate.begun, in_ram(store)) == ([A.key], [True, False, False, False])
    prefetcher.begin([D.key])  # a later retrieval has a time of its own
    until(lambda: in_ram(store)[3])
    prefetcher.close()


def test_damaged_or_missing_chunk_does_not_stop_the_others(
    tmp_path: Path, store: KVStore, prefetcher: Prefetcher
) -> None:
    record_of(tmp_path, A.key).write_bytes(b"damaged")
    record_of(tmp_path, B.key).unlink()
    prefetcher.begin([A.key, B.key, C.key])
    until(lambda: counts(prefetcher) == (3, 3, 0))
    assert in_ram(store) == [False, False, True, False]


def test_closing_does_not_read_what_was_not_begun(store: KVStore, gate: Gate) -> None:
    prefetcher = Prefetcher(store)
    prefetcher.begin([A.key, B.key, C.key])
    gate.wait_for(A.key)
    with ThreadPoolExecutor(1) as pool:
        closed = pool.submit(prefetcher.close)
        time.sleep(0.005)
        gate.open()
        closed.result(timeout=30)
    assert gate.begun == [A.key]
