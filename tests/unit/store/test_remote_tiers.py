"""What servers do to a tier: gone, killed, silent, slow, mad, or well. Of every kind, real ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import pytest

from blendrag.store.tiers.interface import Opened, TierError
from blendrag.store.tiers.remote import Breaker, RemoteTier, describe
from forked import Forked
from places import free_port
from proxy import Proxy
from servers import (
    KINDS,
    LAYOUT,
    LONG,
    OTHER,
    REST,
    WAIT,
    A,
    B,
    Kind,
    Served,
    make_record,
    opened_of,
    redis_server,
    rows_of,
    running,
    s3_server,
    seconds,
    serving,
    tier_at,
    whole,
)


@pytest.mark.parametrize("kind", KINDS)
def test_server_that_is_gone_at_the_start_is_used_when_it_comes(kind: Kind, tmp_path: Path) -> None:
    server = redis_server(tmp_path) if kind == "redis" else s3_server(tmp_path)
    tier = tier_at(kind, server.port, cooldown_s=REST)
    for _ in range(3):
        with pytest.raises(TierError):
            tier.put(A)
    assert (tier.stats()["errors"], tier.stats()["refused"]) == (1, 2)
    with running(server):
        time.sleep(REST)
        tier.put(A)
        assert whole(tier, A.key)
    assert tier.stats()["errors"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_server_that_was_killed_is_used_again_when_it_is_back(kind: Kind, tmp_path: Path) -> None:
    with serving(kind, tmp_path) as served:
        tier = served.tier()
        tier.put(A)
        opened = opened_of(tier, A)
        served.server.kill()
        with pytest.raises(TierError):
            rows_of(tier, opened)
        with pytest.raises(TierError, match="not asked"):
            tier.open([A.key])
        served.server.start()
        time.sleep(REST)
        tier.put(A)
        assert whole(tier, A.key)


def test_connection_that_the_server_closed_while_idle_is_no_failure(served: Served, proxy: Proxy) -> None:
    tier = served.tier(proxy.port)
    tier.put(A)
    proxy.mode = "refuse"
    proxy.mode = "pass"
    assert whole(tier, A.key)
    assert tier.stats()["errors"] == 0


def test_silent_server_costs_one_timeout(served: Served) -> None:
    calls: dict[str, Callable[[RemoteTier, Opened], object]] = {
        "open": lambda tier, opened: tier.open([A.key, B.key]),
        "read": rows_of,
        "put": lambda tier, opened: tier.put(B),
        "has": lambda tier, opened: tier.has([A.key, B.key]),
        "delete": lambda tier, opened: tier.delete([A.key]),
    }
    served.tier().put(A)

    def check(what: str) -> None:
        with Proxy(served.server.address) as proxy:
            tier = served.tier(proxy.port, cooldown_s=60)
            opened = opened_of(tier, A)
            proxy.mode = "hang"
            assert 0.9 * WAIT < seconds(lambda: calls[what](tier, opened)) < 1.9 * WAIT, f"{what}: not once"
            assert min(seconds(lambda: tier.open([A.key])) for _ in range(5)) < 0.1 * WAIT
            assert (tier.stats()["errors"], tier.stats()["refused"]) == (1, 5)

    with ThreadPoolExecutor(len(calls)) as threads:  # all they do is wait
        list(threads.map(check, calls))


def test_server_that_is_silent_from_the_start_costs_one_timeout(served: Served, proxy: Proxy) -> None:
    proxy.mode = "hang"
    tier = served.tier(proxy.port)
    assert 0.9 * WAIT < seconds(lambda: tier.open([A.key])) < 1.9 * WAIT


def test_server_that_drips_is_not_waited_for(served: Served, proxy: Proxy) -> None:
    """Every byte would begin a timeout anew."""
    served.tier().put(LONG)
    tier = served.tier(proxy.port)
    proxy.rate = 5_000
    assert seconds(lambda: whole(tier, LONG.key)) < 1.9 * WAIT


def test_server_that_is_merely_slow_is_used(served: Served, proxy: Proxy) -> None:
    served.tier().put(LONG)
    proxy.rate, proxy.delay_s = 5e6, 0.02
    tier = served.tier(proxy.port)
    assert whole(tier, LONG.key)
    assert tier.stats()["errors"] == 0


@pytest.mark.parametrize("mode", ["garbage", "cut"])
@pytest.mark.parametrize("connected", [True, False])
def test_mad_answers_are_an_error_and_then_over(
    served: Served, proxy: Proxy, mode: Literal["garbage", "cut"], connected: bool
) -> None:
    served.tier().put(LONG)
    tier = served.tier(proxy.port)
    if connected:
        tier.has([LONG.key])
    proxy.mode = mode
    with pytest.raises(TierError):
        whole(tier, LONG.key)
    with pytest.raises(TierError, match="not asked"):
        tier.has([LONG.key])
    proxy.mode = "pass"
    time.sleep(REST)
    assert whole(tier, LONG.key)


def test_close_ends_a_call_that_waits(served: Served, proxy: Proxy) -> None:
    tier = served.tier(proxy.port, timeout_s=60)
    tier.has([A.key])
    proxy.mode = "hang"
    failed: list[float] = []
    thread = threading.Thread(target=lambda: failed.append(seconds(lambda: tier.has([A.key]))))
    thread.start()
    time.sleep(0.1)
    tier.close()
    thread.join(10)
    assert failed, "still waiting"


# -- the breaker -------------------------------------------------------------------------------------------


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_breaker_lets_one_call_find_out() -> None:
    clock = Clock()
    breaker = Breaker(5.0, clock)
    assert breaker.admits() and breaker.admits()
    breaker.failure()
    assert not breaker.admits()
    clock.now += 4.9
    assert not breaker.admits()
    clock.now += 0.2
    assert [breaker.admits() for _ in range(3)] == [True, False, False]
    breaker.failure()
    clock.now += 4.9
    assert not breaker.admits()
    clock.now += 0.2
    assert breaker.admits()
    breaker.success()
    assert breaker.admits() and breaker.admits()


def test_probe_that_was_interrupted_does_not_stay_out_for_ever() -> None:
    class Interrupted(RemoteTier):
        def _has(self, keys: object) -> set[str]:
            raise KeyboardInterrupt

        _first = _rows = _put = _delete = _has  # type: ignore[assignment]

    tier = Interrupted(tier_at("redis", free_port()).spec, LAYOUT)
    tier._breaker = Breaker(0.0)
    tier._breaker.failure()
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            tier.has([A.key])


# -- a server that is well ------------------------------------------------------------------------------


def test_record_that_comes_back_changed_is_noticed(served: Served) -> None:
    tier = served.tier()
    for record in (A, LONG):
        tier.put(record)
        assert served.kept(record.key) == record.bytes()
        opened = opened_of(tier, record)
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
        opened = opened_of(tier, record)
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
