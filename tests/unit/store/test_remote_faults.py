"""What servers do to a tier: gone, killed, silent, slow, mad. For every kind of server, real ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import pytest

from blendrag.store.tiers.interface import Opened, TierError
from blendrag.store.tiers.remote import Breaker, RemoteTier
from proxy import Proxy
from servers import (
    KINDS,
    LAYOUT,
    LONG,
    REST,
    WAIT,
    A,
    B,
    Kind,
    Served,
    free_port,
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
        opened = tier.open([A.key])[A.key]
        assert isinstance(opened, Opened)
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
            opened = tier.open([A.key])[A.key]
            assert isinstance(opened, Opened)
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
