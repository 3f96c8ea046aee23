"""Records on a healthy server that are not what they should be: damaged, and not the server's fault."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from blendrag.store.record import DamagedError
from servers import OTHER, A, B, Served, make_record, raw, whole

fast = settings(suppress_health_check=list(HealthCheck))


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
def test_any_other_bytes_under_a_key_are_a_damaged_record(served: Served, data: bytes) -> None:
    served.keep(A.key, data)
    tier = served.tier(timeout_s=5)
    assert isinstance(tier.open([A.key])[A.key], DamagedError)
    tier.close()
