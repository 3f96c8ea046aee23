"""What servers do to a tier: gone, killed, silent, slow, mad, lying. For every kind of server, real ones."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from proxy import Proxy
from servers import (
    LAYOUT,
    OTHER,
    Served,
    answering,
    free_port,
    make_record,
    raw,
    redis_server,
    rows_of,
    running,
    s3_server,
    serving,
    tier_at,
)

from blendrag.store.record import HEAD_READ, DamagedError
from blendrag.store.tiers.breaker import Breaker
from blendrag.store.tiers.interface import Opened, Tier, TierError
from blendrag.store.tiers.remote import RemoteTier, describe

KINDS = ["redis", "object"]
Kind = Literal["redis", "object"]
A, B = make_record(1), make_record(2)
LONG = make_record(3, tokens=6000)  # its head takes more than one read
WAIT = 0.5  # seconds: timeout of the tiers here
REST = 0.2  # seconds: their cooldown

MODIFIED = "Last-Modified: Sat, 21 Nov 2026 10:00:00 GMT"

fast = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(request.param, tmp_path_factory.mktemp(request.param)) as served:
        yield served


@pytest.fixture
def proxy(served: Served) -> Iterator[Proxy]:
    with Proxy(served.server.address) as proxy:
        yield proxy


def whole(tier: Tier, key: str) -> bool:
    """Whether a record is there, and all of it."""
    opened = tier.open([key]).get(key)
    if isinstance(opened, Exception):
        raise opened
    return opened is not None and len(rows_of(tier, opened)) == LAYOUT.num_layers


def seconds(call: Callable[[], object]) -> float:
    """How long a call took that failed as a tier's calls do."""
    start = time.perf_counter()
    with pytest.raises(TierError):
        call()
    return time.perf_counter() - start


# -- a healthy server --------------------------------------------------------------------------------------


def test_record_that_comes_back_changed_is_noticed(served: Served) -> None:
    tier = served.tier()
    for record in (A, LONG):
        tier.put(record)
        assert served.kept(record.key) == raw(record)
        opened = tier.open([record.key])[record.key]
        assert isinstance(opened, Opened)
        for group in (1, 4, 100):
            assert rows_of(tier, opened, group).equal(record.rows)


def test_what_one_engine_keeps_is_not_lost_to_another(served: Served) -> None:
    served.tier().put(A)
    assert whole(served.tier(), A.key)


def test_other_layout_or_namespace_is_not_seen(served: Served) -> None:
    served.tier().put(A)
    other = served.tier(layout=OTHER)
    assert (other.open([A.key]), other.has([A.key]), other.delete([A.key])) == ({}, set(), 0)
    assert served.tier().has([A.key]) == {A.key}


def test_counts_that_do_not_add_up_are_not_shown(served: Served) -> None:
    tier = served.tier()
    tier.put(A)
    tier.open([A.key, "f" * 32, "e" * 32])
    assert tier.has([A.key, "f" * 32]) == {A.key}
    assert tier.delete([A.key, "f" * 32]) == 1
    counted = {name: count for name, count in tier.stats().items() if count}
    assert counted == {"puts": 1, "hits": 1, "misses": 2}


def test_many_keys_are_not_too_many(served: Served) -> None:
    tier = served.tier(timeout_s=5)
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


# -- a server that cannot be used --------------------------------------------------------------------------


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


@pytest.mark.parametrize("what", ["open", "read", "put", "has", "delete"])
def test_silent_server_costs_one_timeout(served: Served, proxy: Proxy, what: str) -> None:
    tier = served.tier(proxy.port, cooldown_s=60)
    tier.put(A)
    opened = tier.open([A.key])[A.key]
    assert isinstance(opened, Opened)
    calls: dict[str, Callable[[], object]] = {
        "open": lambda: tier.open([A.key, B.key]),
        "read": lambda: rows_of(tier, opened),
        "put": lambda: tier.put(B),
        "has": lambda: tier.has([A.key, B.key]),
        "delete": lambda: tier.delete([A.key]),
    }
    proxy.mode = "hang"
    assert 0.9 * WAIT < seconds(calls[what]) < 1.9 * WAIT  # once, and not twice
    assert min(seconds(lambda: tier.open([A.key])) for _ in range(5)) < 0.1 * WAIT
    assert (tier.stats()["errors"], tier.stats()["refused"]) == (1, 5)


def test_server_that_is_silent_from_the_start_costs_one_timeout(served: Served, proxy: Proxy) -> None:
    proxy.mode = "hang"
    tier = served.tier(proxy.port)
    assert 0.9 * WAIT < seconds(lambda: tier.open([A.key])) < 1.9 * WAIT


def test_server_that_drips_is_not_waited_for(served: Served, proxy: Proxy) -> None:
    """Every byte would begin a timeout anew."""
    served.tier().put(LONG)
    tier = served.tier(proxy.port)
    proxy.rate = 20_000
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


def test_request_that_an_object_store_was_too_busy_for_is_sent_again() -> None:
    replies = [http("Content-Length: 0", status="503 Slow Down"), object_reply(len(raw(A)), raw(A))]
    with answering(lambda _: [replies.pop(0)]) as port:
        assert isinstance(tier_at("object", port).open([A.key])[A.key], Opened)


# -- records that are not what they should be --------------------------------------------------------------


def claims(tokens: int, header_bytes: int | None = None) -> bytes:
    """A record of A's identity, whose header claims so many tokens, and so many bytes of header."""
    length = int.from_bytes(raw(A)[:8], "little")
    fields = json.loads(raw(A)[8 : 8 + length])
    fields["token_ids"] = {"dtype": "I32", "shape": [tokens], "data_offsets": [0, 4 * tokens]}
    header = json.dumps(fields).encode()
    return (header_bytes or len(header)).to_bytes(8, "little") + header + bytes(1000)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(raw(A)[:-1], id="cut off in its rows"),
        pytest.param(raw(A)[:100], id="cut off in its header"),
        pytest.param(raw(A)[:4], id="cut off at once"),
        pytest.param(raw(A) + b"x", id="too long"),
        pytest.param(raw(B), id="another key's"),
        pytest.param(raw(make_record(1, layout=OTHER)), id="another layout's"),
        pytest.param(claims(16, 1 << 62), id="header of exabytes"),
        pytest.param(claims(16, 1 << 16), id="header longer than the record"),
        pytest.param(claims(10**9), id="10 GB of tokens"),
        pytest.param(claims(4_000_000), id="as many tokens as are allowed"),
    ],
)
def test_record_that_lies_is_its_own_trouble_and_not_the_server_s(served: Served, data: bytes) -> None:
    tier = served.tier()
    tier.put(B)
    served.keep(A.key, data)
    tracemalloc.start()
    try:
        found = tier.open([A.key, B.key])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(found[A.key], DamagedError)
    assert peak < 2_000_000
    assert whole(tier, B.key)
    assert tier.delete([A.key]) == 1
    tier.put(A)
    assert whole(tier, A.key)
    assert tier.stats()["errors"] == 0


def test_flipped_bit_in_a_row_is_found_by_its_checksum(served: Served) -> None:
    data = bytearray(raw(A))
    data[-1] ^= 1
    served.keep(A.key, bytes(data))
    with pytest.raises(DamagedError, match="checksum of layer 5"):
        whole(served.tier(), A.key)


@fast
@given(st.binary(min_size=1, max_size=300) | st.binary().map(lambda more: raw(A)[:200] + more))
@example(b"\x02" + bytes(7) + b"[]")
@example(b"\x08" + bytes(7) + b'{"a":{}}')
def test_bytes_under_a_key_that_raise_something_else_are_not_found(served: Served, data: bytes) -> None:
    served.keep(A.key, data)
    tier = served.tier(timeout_s=5)
    assert isinstance(tier.open([A.key])[A.key], DamagedError)
    tier.close()


# -- answers that are not what they should be --------------------------------------------------------------


def http(headers: str, body: bytes = b"", status: str = "206 Partial Content") -> bytes:
    return f"HTTP/1.1 {status}\r\n{headers}\r\n\r\n".encode() + body


def redis_reply(size: int, body: bytes) -> bytes:
    return b":%d\r\n$%d\r\n%s\r\n" % (size, len(body), body)


def object_reply(size: int, body: bytes) -> bytes:
    return http(
        f"Content-Range: bytes 0-{len(body) - 1}/{size}\r\nContent-Length: {len(body)}\r\n"
        f"ETag: 1\r\n{MODIFIED}",
        body,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [0, 1, len(raw(A)) - 1, len(raw(A)) + 1, 10 << 30, 1 << 62])
def test_size_that_lies_is_refused_before_anything_is_allocated(kind: Kind, size: int) -> None:
    reply = redis_reply if kind == "redis" else object_reply
    with answering(lambda _: [reply(size, raw(A))]) as port:
        tier = tier_at(kind, port)
        tracemalloc.start()
        try:
            found: object = tier.open([A.key]).get(A.key)
        except TierError as error:
            found = error
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert not isinstance(found, Opened)
    assert peak < 2_000_000


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.timeout(30)
def test_answer_that_stays_too_short_is_not_asked_for_for_ever(kind: Kind) -> None:
    reply = redis_reply if kind == "redis" else object_reply
    asked = 0

    def answer(_: bytes) -> list[bytes]:
        nonlocal asked
        asked += 1
        return [reply(len(raw(A)), raw(A)[:10])]

    with answering(answer) as port:
        try:
            found: object = tier_at(kind, port).open([A.key])[A.key]
        except TierError as error:
            found = error
    assert isinstance(found, (DamagedError, TierError))
    assert asked <= 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("claimed", [10 << 30, None])
def test_answer_without_end_is_not_listened_to(kind: Kind, claimed: int | None) -> None:
    """Not even as fast as a local server sends it, for as long as a timeout lasts."""
    sent = 0

    def flood(_: bytes) -> Iterator[bytes]:
        nonlocal sent
        at = f"Content-Range: bytes 0-{HEAD_READ - 1}/{len(raw(A))}\r\nETag: 1\r\n{MODIFIED}\r\n"
        if kind == "redis":
            yield b":%d\r\n" % len(raw(A)) + (b"$%d\r\n" % claimed if claimed else b"+")
        elif claimed:
            yield http(at + f"Content-Length: {claimed}")
        else:
            yield http(at + "Transfer-Encoding: chunked")
        part = bytes(1 << 16)
        if not claimed and kind == "object":
            part = b"10000\r\n" + part + b"\r\n"
        while True:
            sent += len(part)
            yield part

    with answering(flood) as port:
        tier = tier_at(kind, port, timeout_s=5)
        assert seconds(lambda: tier.open([A.key])) < 2.5
    assert sent < 32 << 20  # what buffers on the way have taken


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", [-1, 1, 5000])
def test_rows_of_another_length_than_asked_are_not_taken(kind: Kind, change: int) -> None:
    first = [True]

    def answer(_: bytes) -> Iterable[bytes]:
        reply = redis_reply if kind == "redis" else object_reply
        if first.pop() if first else False:
            return [reply(len(raw(A)), raw(A))]
        rows = bytes(len(raw(A)) + change)[A.head.begin :]
        if kind == "redis":
            return [b"$%d\r\n%s\r\n" % (len(rows), rows)]
        end = A.head.begin + len(rows)
        at = f"Content-Range: bytes {A.head.begin}-{end - 1}/{len(raw(A))}\r\nContent-Length: {len(rows)}"
        return [http(f"{at}\r\nETag: 1\r\n{MODIFIED}", rows)]

    with answering(answer) as port:
        tier = tier_at(kind, port)
        opened = tier.open([A.key])[A.key]
        assert isinstance(opened, Opened)
        with pytest.raises((TierError, DamagedError)):
            rows_of(tier, opened, group=LAYOUT.num_layers)


RESP = st.lists(
    st.one_of(
        st.binary(max_size=40),
        st.integers().map(lambda n: b":%d\r\n" % n),
        st.integers(-2, 1 << 70).map(lambda n: b"$%d\r\n" % n),
        st.integers(-2, 1 << 70).map(lambda n: b"*%d\r\n" % n),
        st.binary(max_size=40).map(lambda data: b"$%d\r\n%s\r\n" % (len(data), data)),
        st.sampled_from([b"+OK\r\n", b"-ERR no\r\n", b"-MOVED 1 a:1\r\n", b"-LOADING x\r\n", b"_\r\n"]),
        st.just(b"*1\r\n" * 2000),
    ),
    min_size=1,
    max_size=4,
).map(b"".join)
HTTP = st.one_of(
    st.binary(min_size=1, max_size=100),
    st.builds(
        lambda status, size, body, more: http(
            f"Content-Length: {len(body)}\r\n{size}\r\n{more}", body, status=f"{status} So"
        ),
        st.sampled_from([200, 206, 204, 301, 304, 400, 403, 404, 412, 416, 500, 503]),
        st.sampled_from(["0-16383/99", "9-1/x", "0-0/" + "9" * 30]).map("Content-Range: bytes {}".format),
        st.binary(max_size=60),
        st.sampled_from(["X: y", "ETag: 1", "Last-Modified: never", MODIFIED]),
    ),
)


@pytest.mark.parametrize("kind", KINDS)
@fast
@given(data=st.data())
def test_answer_that_raises_something_else_is_not_found(kind: Kind, data: st.DataObject) -> None:
    reply = data.draw(RESP if kind == "redis" else HTTP)
    with answering(lambda _: [reply]) as port:
        tier = tier_at(kind, port, timeout_s=0.05, cooldown_s=1e-9)
        calls: list[Callable[[], object]] = [
            lambda: tier.open([A.key, B.key]),
            lambda: tier.has([A.key]),
            lambda: tier.put(A),
            lambda: tier.delete([A.key]),
        ]
        for call in calls:
            try:
                found = call()
            except TierError:
                continue
            assert not isinstance(found, dict) or not any(isinstance(one, Opened) for one in found.values())
        tier.close()


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


# -- what else must not happen -----------------------------------------------------------------------------


def test_import_of_the_tiers_loads_no_client() -> None:
    code = "import sys, blendrag.store.tiers.redis, blendrag.store.tiers.object; "
    code += "print({'redis', 'obstore'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"


def test_throttle_that_lets_more_through_is_no_throttle(served: Served, proxy: Proxy) -> None:
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
