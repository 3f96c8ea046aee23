from __future__ import annotations

import json
import os
import resource
import tracemalloc
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from blendrag.store.codec import CODECS
from blendrag.store.identity import KVIdentity
from blendrag.store.record import HEAD_READ, DamagedError, Head, Layout, Miss
from stores import (
    IDENTITY,
    LAYOUT,
    A,
    Chunk,
    filled,
    from_bytes,
    get,
    gone,
    make_chunk,
    make_record,
    put,
    record_of,
    same,
)

DTYPES = ["bfloat16", "float16", "float32"]
WIDE = KVIdentity("wide", "weights-1", "auto", num_layers=3, num_kv_heads=2, head_size=32)
CHUNK = make_chunk(1)
RECORD = make_record(CHUNK)
DATA = RECORD.bytes()
SIZE = len(DATA)


@cache
def layout_of(codec: str, dtype: str) -> Layout:
    return Layout(replace(WIDE, codec=codec), dtype)


def chunk_of(layout: Layout, tokens: int) -> Chunk:
    return make_chunk(tokens, tokens, layout.dtype, layout.identity)


def read_in_steps(layout: Layout, key: str, data: bytes) -> Head:
    """As a tier does: a first read, and a longer one where it is needed."""
    wanted = HEAD_READ
    while isinstance(head := layout.parse(key, data[:wanted], len(data)), int):
        assert wanted < head <= len(data)
        wanted = head
    return head


# -- what is written can be read ------------------------------------------------------------------------


@given(st.integers(1, 300), st.sampled_from(sorted(CODECS)), st.sampled_from(DTYPES))
def test_record_comes_back_as_it_was(tokens: int, codec: str, dtype: str) -> None:
    layout = layout_of(codec, dtype)
    chunk = chunk_of(layout, tokens)
    record = make_record(chunk, layout)
    data = record.bytes()
    found = from_bytes(data, chunk.key, layout)
    assert (found.head.tokens, found.head.nbytes, found.nbytes) == (tokens, len(data), record.rows.numel())
    assert found.head.begin == len(data) - record.rows.numel()
    assert tuple(found.head.ids.tolist()) == chunk.token_ids
    assert found.decode().view(torch.uint8).equal(record.decode().view(torch.uint8))
    if codec == "raw":
        assert found.decode().view(torch.uint8).equal(chunk.kv.view(torch.uint8))


@pytest.mark.parametrize("tokens", [1, 512, 2_000, 20_000])
def test_head_that_is_longer_than_the_first_read_is_read_to_its_end(tokens: int) -> None:
    record = make_record(make_chunk(1, tokens))
    data = record.bytes()
    head = read_in_steps(LAYOUT, record.key, data)
    assert (head.checksums, head.nbytes) == (record.head.checksums, len(data))
    assert head.bytes() == data[: head.begin] == record.head.bytes()
    assert np.array_equal(head.ids, record.head.ids)


@pytest.mark.parametrize("codec", CODECS)
def test_record_is_a_file_that_the_safetensors_library_reads(codec: str) -> None:
    layout = layout_of(codec, "bfloat16")
    record = make_record(chunk_of(layout, 37), layout)
    tensors = safetensors.torch.load(record.bytes())
    assert set(tensors) == {"token_ids", "layers"}
    assert tensors["token_ids"].tolist() == record.head.ids.tolist()
    assert tensors["layers"].equal(record.rows)


def test_layers_are_verified_one_by_one() -> None:
    rows = RECORD.rows.clone()
    rows[1, 7] ^= 1
    RECORD.head.verify(0, rows[:1])
    for first in (0, 1):
        with pytest.raises(DamagedError, match="layer 1") as caught:
            RECORD.head.verify(first, rows[first:])
        assert caught.value.key == CHUNK.key


@given(st.lists(st.integers(0, 60_000), max_size=12))
def test_only_the_beginning_of_the_chunk_is_its_beginning(ids: list[int]) -> None:
    expected = tuple(ids) == CHUNK.token_ids[: len(ids)]
    assert RECORD.head.starts_with(ids) == expected
    assert all(RECORD.head.starts_with(CHUNK.token_ids[:n]) for n in range(len(CHUNK.token_ids) + 1))
    assert not RECORD.head.starts_with([*CHUNK.token_ids, 1])


# -- what others wrote is refused -----------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"weights": "2"}, {"prefix": "01"}, {"namespace": "b"}, {"layout": 1}])
def test_record_of_another_identity_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(DamagedError, match="another model, codec or version"):
        Layout(replace(IDENTITY, **change), "bfloat16").parse(CHUNK.key, DATA, SIZE)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_record_of_another_codec_or_dtype_is_refused(codec: str, dtype: str) -> None:
    layout = layout_of(codec, dtype)
    record = make_record(chunk_of(layout, 9), layout)
    data = record.bytes()
    for other in CODECS:
        for another in DTYPES:
            if (other, another) != (codec, dtype):
                with pytest.raises(DamagedError):
                    layout_of(other, another).parse(record.key, data, len(data))


def header(fields: object) -> bytes:
    text = json.dumps(fields).encode()
    return len(text).to_bytes(8, "little") + text


def honest(**changes: object) -> dict[str, Any]:
    """The fields of a good header, but for the changes (``a__b``: b in a; meta: the metadata)."""
    length = int.from_bytes(DATA[:8], "little")
    fields: dict[str, Any] = json.loads(DATA[8 : 8 + length])
    for path, value in changes.items():
        *outer, last = ("__metadata__" if name == "meta" else name for name in path.split("__"))
        inner = fields
        for name in outer:
            inner = inner[name]
        inner[last] = value
    return fields


@pytest.mark.parametrize("length", [0, 1, 1 << 16 | 1, 1 << 31, 1 << 60, (1 << 64) - 1])
def test_header_of_an_incredible_length_is_refused_unread(length: int) -> None:
    tracemalloc.start()
    with pytest.raises(DamagedError, match="a header of"):
        LAYOUT.parse(CHUNK.key, length.to_bytes(8, "little") + DATA[8:HEAD_READ], 1 << 62)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    "tokens", [-1, 0, 9, 1 << 22, (1 << 22) + 1, 1 << 60, 10**400, 8.0, True, None, "8", [8]]
)
def test_number_of_tokens_that_lies_allocates_nothing(tokens: object) -> None:
    """Whatever the size of the file: one that is as long as it claims may be sparse."""
    first = header(honest(token_ids__shape=[tokens]))
    honest_size = len(first) + 36 * tokens if isinstance(tokens, int) else SIZE
    for size in (SIZE, honest_size, 1 << 30):
        tracemalloc.start()
        with pytest.raises(DamagedError):
            wanted = LAYOUT.parse(CHUNK.key, first, size)
            assert isinstance(wanted, int) and wanted <= min(size, 1 << 25)  # read, and still refused
            LAYOUT.parse(CHUNK.key, first + bytes(wanted - len(first)), size)
        assert tracemalloc.get_traced_memory()[1] < 1 << 26
        tracemalloc.stop()


@pytest.mark.parametrize(
    "changes",
    [
        {"meta__key": "another"},
        {"meta__ids": "0" * 16},
        {"meta__rows": ""},
        {"meta__rows": "0" * 33},
        {"meta__rows": 7},
        {"meta__rows": "\ud800" * 32},
        {"meta__codec": "int4"},
        {"meta__extra": "1"},
        {"meta__drafts": "1 head"},
        {"meta__drafts": "0 head"},
        {"meta__drafts": "-1 head"},
        {"meta__drafts": "9" * 5000},
        {"meta": []},
        {"token_ids__shape": []},
        {"token_ids__shape": {"8": 1}},
        {"token_ids__dtype": "F32"},
        {"layers__shape": [1, 1]},
        {"layers__data_offsets": [0, 1 << 60]},
        {"more": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}},
    ],
)
def test_header_that_differs_in_anything_is_refused(changes: dict[str, object]) -> None:
    first = header(honest(**changes))
    body = DATA[RECORD.head.begin - 4 * len(CHUNK.token_ids) :]
    for data in (first + body, first):
        with pytest.raises(DamagedError):
            LAYOUT.parse(CHUNK.key, data, len(data))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
METADATA = st.fixed_dictionaries({"rows": JSON, "identity": JSON | st.just(LAYOUT.digest)})
SHAPES = st.fixed_dictionaries(
    {},
    optional={
        "token_ids": JSON | st.fixed_dictionaries({"shape": JSON | st.lists(st.integers(), max_size=2)}),
        "__metadata__": JSON | METADATA,
        "layers": JSON,
    },
)
HOSTILE = st.one_of(
    st.binary(max_size=200),
    st.binary(max_size=200).map(lambda data: len(data).to_bytes(8, "little") + data),
    JSON.map(header),
    SHAPES.map(header),
    st.integers(1, 30_000).map(lambda depth: (2 * depth).to_bytes(8, "little") + b"[" * depth + b"]" * depth),
)


@given(HOSTILE, st.binary(max_size=40), st.one_of(st.integers(0, 1 << 62), st.none()))
def test_no_bytes_make_the_parser_raise_anything_else(data: bytes, rest: bytes, size: int | None) -> None:
    data += rest
    try:
        found = LAYOUT.parse(CHUNK.key, data, len(data) if size is None else max(size, len(data)))
    except DamagedError:
        return
    assert isinstance(found, int) and len(data) < found < 1 << 25  # cut off in a header, at most


# -- files that somebody made to do harm ----------------------------------------------------------------

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
    "a header of 2^60 bytes": ((1 << 60).to_bytes(8, "little") + make_record(A).bytes()[8:], None),
    "an honest record, and a GiB of nothing": (make_record(A).bytes(), GIB),
    "more tokens than there are": (claim(GIB // 36), len(claim(1)) + 36 * (GIB // 36)),
    "as many tokens as are let in": (claim(MAX_TOKENS), len(claim(MAX_TOKENS)) + 36 * MAX_TOKENS),
    "a few tokens too many": (claim(100), len(claim(100)) + 3600),
    "nothing but zeros": (b"", GIB),
    "a header only": (make_record(A).bytes()[:1024], None),
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


def test_header_with_what_no_text_can_hold_is_damage(tmp_path: Path) -> None:
    record = make_record(A)
    store = filled(tmp_path, [A])
    head = LAYOUT.header(A.key, record.head.ids, record.head.checksums, context="\ud800")
    record_of(tmp_path, A.key).write_bytes(head + record.bytes()[len(head) :])
    assert get(store, A) == Miss("damaged")
    assert gone(tmp_path, A)
