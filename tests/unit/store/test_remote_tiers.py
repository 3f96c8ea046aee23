"""Remote tiers whose server is well: what comes back, counts, threads, and what a tier takes with it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from blendrag.store.tiers.interface import Opened
from blendrag.store.tiers.remote import describe
from forked import Forked
from proxy import Proxy
from servers import LONG, OTHER, A, Served, make_record, raw, rows_of, whole


def test_record_that_comes_back_changed_is_noticed(served: Served) -> None:
    tier = served.tier()
    for record in (A, LONG):
        tier.put(record)
        assert served.kept(record.key) == raw(record)
        opened = tier.open([record.key])[record.key]
        assert isinstance(opened, Opened)
        for group in (1, 4, 100):
            assert rows_of(tier, opened, group).equal(record.rows)


def test_other_layout_or_namespace_is_not_seen(served: Served) -> None:
    served.tier().put(A)
    other = served.tier(layout=OTHER)
    assert (other.open([A.key]), other.has([A.key]), other.delete([A.key])) == ({}, set(), 0)
    assert served.tier().has([A.key]) == {A.key}


def test_counts_add_up(served: Served) -> None:
    tier = served.tier()
    tier.put(A)
    tier.open([A.key, "f" * 32, "e" * 32])
    assert tier.has([A.key, "f" * 32]) == {A.key}
    assert tier.delete([A.key, "f" * 32]) == 1
    counted = {name: count for name, count in tier.stats().items() if count}
    assert counted == {"puts": 1, "hits": 1, "misses": 2}


def test_many_keys_are_not_too_many(served: Served) -> None:
    tier = served.tier(timeout_s=60)
    tier.put(A)
    assert tier.has([*(f"{n:032x}" for n in range(1200)), A.key]) == {A.key}
    assert tier.open([]) == {} and tier.has([]) == set() and tier.delete([]) == 0


def test_threads_do_not_take_each_other_s_answers(served: Served) -> None:
    records = [make_record(seed, tokens=64 + seed) for seed in range(8)]
    tier = served.tier(timeout_s=10)
    for record in records:
        tier.put(record)

    def use(n: int) -> bool:
        record = records[n % len(records)]
        tier.put(make_record(1000 + n))
        opened = tier.open([record.key])[record.key]
        assert isinstance(opened, Opened)
        return rows_of(tier, opened).equal(record.rows)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(use, range(48)))


def test_import_of_the_tiers_loads_no_client() -> None:
    process = Forked(
        "import sys, stores; print({'blendrag.store.tiers.redis', 'redis', 'obstore'} & {*sys.modules})"
    )
    assert process.finished() == "{'blendrag.store.tiers.redis'}\n"


def test_throttle_lets_no_more_through_than_its_rate(served: Served, proxy: Proxy) -> None:
    """Benchmarks rely on it. Slower than its rate it may be, on a busy machine; faster never."""
    record = make_record(9, tokens=20_000)  # 2 MB
    served.tier(timeout_s=10).put(record)
    proxy.rate = 10e6
    tier = served.tier(proxy.port, timeout_s=10)
    start = time.perf_counter()
    assert whole(tier, record.key)
    assert time.perf_counter() - start > 0.95 * record.head.nbytes / proxy.rate


def test_message_of_a_library_does_not_pass_on_what_a_url_carries() -> None:
    error = ValueError("GET https://me:s3cr3t@host/x?sig=s3cr3t failed\nDebug: s3cr3t")
    assert describe(error) == "ValueError: GET https://host/x?... failed"
