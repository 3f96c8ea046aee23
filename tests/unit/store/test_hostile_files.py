"""Files that somebody made to do harm: refused before anything is allocated for them, and put aside."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import pytest
import xxhash

from blendrag.store.record import Miss
from stores import LAYOUT, A, filled, get, gone, make_record, put, record_of, same, to_bytes

GIB = 1 << 30
MAX_TOKENS = 1 << 22


def claim(tokens: int) -> bytes:
    """A header that is right in everything, for a chunk of ``tokens`` zeros under A's key."""
    ids = np.zeros(tokens, dtype="<i4")
    row = xxhash.xxh3_64_hexdigest(bytes(LAYOUT.codec.row_bytes(tokens)))
    return LAYOUT.header(A.key, ids, [row] * LAYOUT.num_layers)


def grown() -> int:
    """Bytes that this process has had in memory at most."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


FILES = {
    "a header of 2^60 bytes": ((1 << 60).to_bytes(8, "little") + to_bytes(make_record(A))[8:], None),
    "an honest record, and a GiB of nothing": (to_bytes(make_record(A)), GIB),
    "more tokens than there are": (claim(GIB // 36), len(claim(1)) + 36 * (GIB // 36)),
    "as many tokens as are let in": (claim(MAX_TOKENS), len(claim(MAX_TOKENS)) + 36 * MAX_TOKENS),
    "a few tokens too many": (claim(100), len(claim(100)) + 3600),
    "nothing but zeros": (b"", GIB),
    "a header only": (to_bytes(make_record(A))[:1024], None),
}


@pytest.mark.parametrize("name", FILES)
def test_hostile_file_is_put_aside_before_anything_is_allocated(tmp_path: Path, name: str) -> None:
    data, length = FILES[name]
    store = filled(tmp_path, [A], ram=4 * GIB)
    store.tiers[0].delete([A.key])
    file = record_of(tmp_path, A.key)
    file.write_bytes(data)
    if length is not None:
        os.truncate(file, length)  # sparse
    before = grown()
    store.prefetch(A.key)  # asks for whatever there is: no tokens to compare with
    assert grown() - before < 1 << 26
    assert gone(tmp_path, A)
    assert get(store, A) == Miss("missing")
    assert put(store, A) and same(get(store, A), A)
