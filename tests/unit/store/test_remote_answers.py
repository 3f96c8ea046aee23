"""Servers whose answers are not what they should be: short, endless, of a false size, or any bytes."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blendrag.store.record import HEAD_READ, DamagedError
from blendrag.store.tiers.interface import Opened, TierError
from servers import (
    KINDS,
    LAYOUT,
    OTHER,
    A,
    B,
    Kind,
    Served,
    answering,
    make_record,
    opened_of,
    rows_of,
    seconds,
    tier_at,
    whole,
)

MODIFIED = "Last-Modified: Sat, 21 Nov 2026 10:00:00 GMT"


def http(headers: str, body: bytes = b"", status: str = "206 Partial Content") -> bytes:
    return f"HTTP/1.1 {status}\r\n{headers}\r\n\r\n".encode() + body


def redis_reply(size: int, body: bytes) -> bytes:
    return b":%d\r\n$%d\r\n%s\r\n" % (size, len(body), body)


def object_reply(size: int, body: bytes, first: int = 0) -> bytes:
    at = f"Content-Range: bytes {first}-{first + len(body) - 1}/{size}\r\nContent-Length: {len(body)}"
    return http(f"{at}\r\nETag: 1\r\n{MODIFIED}", body)


REPLIES = {"redis": redis_reply, "object": object_reply}


def test_request_that_an_object_store_was_too_busy_for_is_sent_again() -> None:
    replies = [http("Content-Length: 0", status="503 Slow Down"), object_reply(len(A.bytes()), A.bytes())]
    with answering(lambda _: [replies.pop(0)]) as port:
        assert isinstance(tier_at("object", port).open([A.key])[A.key], Opened)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [0, 1, len(A.bytes()) - 1, len(A.bytes()) + 1, 10 << 30, 1 << 62])
def test_size_that_lies_is_refused_before_anything_is_allocated(kind: Kind, size: int) -> None:
    with answering(lambda _: [REPLIES[kind](size, A.bytes())]) as port:
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
    asked = 0

    def answer(_: bytes) -> list[bytes]:
        nonlocal asked
        asked += 1
        return [REPLIES[kind](len(A.bytes()), A.bytes()[:10])]

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
        at = f"Content-Range: bytes 0-{HEAD_READ - 1}/{len(A.bytes())}\r\nETag: 1\r\n{MODIFIED}\r\n"
        if kind == "redis":
            yield b":%d\r\n" % len(A.bytes()) + (b"$%d\r\n" % claimed if claimed else b"+")
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
    rows = bytes(len(A.bytes()) + change)[A.head.begin :]
    replies = [REPLIES[kind](len(A.bytes()), A.bytes())]
    if kind == "redis":
        replies.append(b"$%d\r\n%s\r\n" % (len(rows), rows))
    else:
        replies.append(object_reply(len(A.bytes()), rows, A.head.begin))
    with answering(lambda _: [replies.pop(0)]) as port:
        tier = tier_at(kind, port)
        opened = opened_of(tier, A)
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
@settings(suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_answer_of_any_bytes_is_no_record(kind: Kind, data: st.DataObject) -> None:
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


# -- healthy servers with damaged records ---------------------------------------------------------------


def claims(tokens: int, header_bytes: int | None = None) -> bytes:
    """A record of A's identity, whose header claims so many tokens, and so many bytes of header."""
    length = int.from_bytes(A.bytes()[:8], "little")
    fields = json.loads(A.bytes()[8 : 8 + length])
    fields["token_ids"] = {"dtype": "I32", "shape": [tokens], "data_offsets": [0, 4 * tokens]}
    header = json.dumps(fields).encode()
    return (header_bytes or len(header)).to_bytes(8, "little") + header + bytes(1000)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(A.bytes()[:-1], id="cut off in its rows"),
        pytest.param(A.bytes()[:100], id="cut off in its header"),
        pytest.param(A.bytes()[:4], id="cut off at once"),
        pytest.param(A.bytes() + b"x", id="too long"),
        pytest.param(b"\x02" + bytes(7) + b"[]", id="no record at all"),
        pytest.param(B.bytes(), id="another key's"),
        pytest.param(make_record(1, layout=OTHER).bytes(), id="another layout's"),
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
    data = bytearray(A.bytes())
    data[-1] ^= 1
    served.keep(A.key, bytes(data))
    with pytest.raises(DamagedError, match="checksum of layer 5"):
        whole(served.tier(), A.key)
