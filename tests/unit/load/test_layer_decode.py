"""The kernel that decodes a layer of all chunks at once, against the codecs: by Triton's interpreter, or on a
GPU where one is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blendrag.load import loader
from blendrag.load.layer_decode import Encoded, LayerDecode
from blendrag.load.slots import CudaSlots
from blendrag.store.codec import CODECS
from blendrag.store.identity import KVIdentity
from blendrag.store.record import Layout
from device import DEVICE, needs_interpreter, needs_kernels
from stand_in_device import stand_in
from stores import get

pytestmark = needs_kernels

# Triton's interpreter has no bfloat16.
DTYPES = [torch.float32, torch.float16] if DEVICE == "cpu" else [torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(CODECS))
@settings(max_examples=10)  # an interpreter is slow
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 20)), min_size=1, max_size=3),
    st.sampled_from([(2, 1, 24), (2, 2, 40)]),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_layer_is_what_the_codec_reads(
    name: str,
    dtype: torch.dtype,
    chunks: Sequence[tuple[int, int]],
    shape: tuple[int, int, int],
    layers: int,
    seed: int,
) -> None:
    heads, shards, size = shape
    identity = KVIdentity("shape", "weights", "dtype", 1, heads, size, codec=name)
    layout = Layout(identity, str(dtype).removeprefix("torch."))
    codec, generator = layout.codec_of(shards), torch.Generator().manual_seed(seed)
    rows, encoded, place = [], [], 0
    for tokens, left_out in chunks:
        length = max(1, tokens - left_out)
        for head in range(0, heads, codec.heads):
            kv = torch.randn(layers, 2, tokens, codec.heads, size, generator=generator)
            rows.append(codec.encode(kv))
            encoded.append(Encoded(tokens, length, place, head))
        place += length
    expected = torch.zeros(layers, 2, place, heads, size, dtype=dtype)
    for own, chunk in zip(rows, encoded, strict=True):
        at, of = slice(chunk.place, chunk.place + chunk.length), slice(chunk.head, chunk.head + codec.heads)
        for row, both in zip(own, expected, strict=True):
            codec.decode(row, chunk.tokens, *both[:, at, of])
    found = torch.zeros_like(expected, device=DEVICE)
    LayerDecode(encoded, codec, layout)(torch.cat([own.flatten() for own in rows]).to(DEVICE), found)
    # A product, of twice the range at most, and a sum: rounded together or apart.
    rounded = 2 * torch.finfo(dtype).eps * float(expected.abs().max())
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0 if name == "raw" else rounded)


@needs_interpreter
@pytest.mark.parametrize("ram", [0, 1 << 22])
def test_loader_has_a_layer_of_all_records_decoded_at_once(
    make_bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, ram: int
) -> None:
    bench, lengths = make_bench("int8", ram, dtype="float16"), (5, 33, 1)
    records = [get(bench.store, chunk) for chunk in bench.chunks]
    whole = torch.cat([one.decode()[:, :, :n] for one, n in zip(records, lengths, strict=True)], dim=2)
    monkeypatch.setattr(loader, "make_slots", CudaSlots)
    monkeypatch.setattr(loader, "decodes_at_once", lambda _: True)
    monkeypatch.setattr(loader, "sent_at_once", lambda _: 2)
    monkeypatch.setattr("blendrag.store.record.Head.decode", None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    with stand_in(monkeypatch), bench.load(bench.open(), lengths) as layers:
        layers.fetch_kv(0)
        for layer in range(3):
            found = torch.stack(layers.synchronize(layer))
            torch.testing.assert_close(found, whole[layer], rtol=0, atol=2e-3)
