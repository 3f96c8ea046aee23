"""Codecs: what they may lose, and what they may not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from blendrag.errors import ConfigError
from blendrag.store.codec import Codec, make_codec
from blendrag.store.codec.int4 import Int4
from blendrag.store.codec.int8 import Int8
from device import DEVICE
from stand_in_device import Crossings, DeviceTensor

LOSSY = ("fp8", "int8", "int4")
ALL = ("raw", *LOSSY)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def both_ways(codec: Codec, kv: torch.Tensor) -> torch.Tensor:
    """All layers encoded, then decoded one by one from copies of their rows."""
    kv, tokens = kv.to(DEVICE), kv.shape[2]
    out = torch.full_like(kv, float("nan"), dtype=codec.dtype)
    for layer, row in enumerate(codec.encode(kv)):
        codec.decode(row.clone(), tokens, out[layer, 0], out[layer, 1])
    return out.cpu()


@st.composite
def kvs(draw: st.DrawFn) -> torch.Tensor:
    """KV of hostile shapes and numbers: any finite ones, some equal, some enormous, some hardly there."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = (
        draw(st.integers(1, 3)),
        2,
        draw(st.sampled_from((1, 2, 3, 31, 32, 33, 64, 65))),
        draw(st.integers(1, 3)),
        draw(st.sampled_from((1, 2, 5, 8, 16, 17, 40))),
    )
    most = torch.finfo(dtype).max
    width = 16 if dtype == torch.float16 else 32
    numbers = st.floats(-most, most, width=width, allow_subnormal=False)
    few = draw(hnp.arrays(np.float32, shape, elements=numbers, fill=numbers))
    seed = draw(st.integers(0, 1 << 30))
    common = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    exponent = draw(st.integers(-12, 3))
    share = draw(st.sampled_from((0, 0.1, 1)))
    kept = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share
    return torch.where(kept, torch.from_numpy(few), common * 10.0**exponent).clamp(-most, most).to(dtype)


def spans(codec: Codec, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Greatest minus least K, the same of V, and V's greatest magnitude, of the group that a number is in."""
    key, value = kv.double().unbind(1)
    tokens, size = key.shape[1], key.shape[3]
    by_tokens, by_channels = (32, 32) if isinstance(codec, Int4) else (tokens, size)
    wide, wide_value, largest = torch.empty_like(key), torch.empty_like(value), torch.empty_like(value)
    for at in range(0, tokens, by_tokens):
        group = key[:, at : at + by_tokens]
        wide[:, at : at + by_tokens] = group.amax(1, keepdim=True) - group.amin(1, keepdim=True)
    for at in range(0, size, by_channels):
        group = value[..., at : at + by_channels]
        wide_value[..., at : at + by_channels] = group.amax(-1, keepdim=True) - group.amin(-1, keepdim=True)
        largest[..., at : at + by_channels] = group.abs().amax(-1, keepdim=True)
    return wide, wide_value, largest


def half_steps(codec: Codec, kv: torch.Tensor) -> torch.Tensor:
    """The most a number may differ by: half a step of its group, and what rounding steps, the middle and the
    result to the codec's dtype adds."""
    kind = torch.finfo(codec.dtype)
    wide, wide_value, largest = spans(codec, kv)
    match codec:
        case Int8():
            key, value = wide / 255 / 2, largest / 127 / 2
        case Int4():
            key, value = wide / 15 / 2, wide_value / 15 / 2
        case _:  # three bits of mantissa: of a number's own size, or of the smallest ones
            number = kv.double()
            reach = wide / 2 * (1 + kind.eps) + number[:, 0].abs() * kind.eps
            key = torch.maximum(reach / 16, reach / 448 / 2**9 / 2)
            value = torch.maximum(number[:, 1].abs() / 16, largest / 448 / 2**9 / 2)
    tiny = kind.smallest_normal * kind.eps
    rounding = kind.eps * kv.double().abs() + tiny * 255
    return torch.stack([key, value], 1) * (1 + 2 * kind.eps) + rounding


def within_half_a_step(codec: Any, kv: torch.Tensor) -> bool:
    kept = kv.clamp(-codec.limit, codec.limit)
    error = (both_ways(codec, kv).double() - kept.double()).abs()
    return bool((error <= half_steps(codec, kept)).all())


@given(kv=kvs(), name=st.sampled_from(LOSSY))
def test_number_is_off_by_half_a_step_at_most(name: str, kv: torch.Tensor) -> None:
    """Also of what is too large, and becomes the limit: what was finite stays finite."""
    assert within_half_a_step(make_codec(name, *kv.shape[3:], kv.dtype), kv)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
def test_largest_numbers_do_not_overflow(name: str, dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    kv = torch.tensor([most, -most, 0, most / 8], dtype=dtype).repeat(1, 2, 8, 1, 1)
    kv[:, :, 4:] *= -1
    assert within_half_a_step(make_codec(name, 1, 4, dtype), kv)


@given(kv=kvs(), name=st.sampled_from(ALL), data=st.data())
def test_prefix_is_the_prefix_of_the_whole(name: str, kv: torch.Tensor, data: st.DataObject) -> None:
    codec, tokens = make_codec(name, *kv.shape[3:], kv.dtype), kv.shape[2]
    n = data.draw(st.integers(0, tokens))
    whole, row = both_ways(codec, kv)[0], codec.encode(kv.to(DEVICE))[0]
    cached = torch.full((n + 2, *kv.shape[3:]), 7.0, dtype=kv.dtype, device=DEVICE)  # a part is the chunk's
    value = torch.empty(n, *kv.shape[3:], dtype=kv.dtype, device=DEVICE)
    codec.decode(row, tokens, cached[1 : n + 1], value)
    assert torch.equal(cached[1 : n + 1].cpu(), whole[0, :n]) and torch.equal(value.cpu(), whole[1, :n])
    assert (cached[[0, -1]] == 7).all()


@given(kv=kvs(), name=st.sampled_from(ALL))
def test_decoding_on_a_device_gives_the_same_numbers_and_the_host_does_not_wait(
    name: str, kv: torch.Tensor
) -> None:
    codec = make_codec(name, *kv.shape[3:], kv.dtype)
    row, (key, value) = codec.encode(kv)[0], both_ways(codec, kv)[0]
    there = [DeviceTensor(torch.empty_like(each)) for each in (key, value)]
    with Crossings() as crossings:
        codec.decode(DeviceTensor(row), kv.shape[2], *there)
    assert not crossings.waits and not crossings.uploads
    assert there[0].held.equal(key) and there[1].held.equal(value)


@given(kv=kvs(), name=st.sampled_from(ALL))
def test_row_is_as_long_as_announced(name: str, kv: torch.Tensor) -> None:
    codec = make_codec(name, *kv.shape[3:], kv.dtype)
    rows = codec.encode(kv)
    assert rows.dtype == torch.uint8 and rows.is_contiguous()
    assert rows.shape == (len(kv), codec.row_bytes(kv.shape[2]))
    assert name == "raw" or rows.shape[1] % 16 == 0, "its parts are aligned"


@given(kv=kvs())
def test_raw_keeps_every_bit(kv: torch.Tensor) -> None:
    found = both_ways(make_codec("raw", *kv.shape[3:], kv.dtype), kv)
    assert torch.equal(found.view(torch.uint8), kv.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
def test_layer_does_not_depend_on_another_layer(name: str, dtype: torch.dtype) -> None:
    codec = make_codec(name, 2, 16, dtype)
    kv = torch.randn(3, 2, 40, 2, 16).to(dtype)
    loud = kv.clone()
    loud[1] *= 1000
    assert torch.equal(codec.encode(kv)[[0, 2]], codec.encode(loud)[[0, 2]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
def test_zeros_and_constant_channels_of_k_are_exact(name: str, dtype: torch.dtype) -> None:
    kv = torch.zeros(2, 2, 37, 2, 16, dtype=dtype)
    kv[:, 0] = torch.linspace(-50, 70, 32).view(2, 16).to(dtype)
    assert torch.equal(both_ways(make_codec(name, 2, 16, dtype), kv), kv)


@pytest.mark.parametrize("name", LOSSY)
def test_outlier_channel_leaves_the_others_alone(name: str) -> None:
    kv = torch.randn(1, 2, 64, 1, 16, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    codec, loud = make_codec(name, 1, 16, torch.bfloat16), kv.clone()
    loud[:, 0, :, :, 3] *= 1e6
    others = [channel for channel in range(16) if channel != 3]
    calm = both_ways(codec, kv)[:, 0][..., others]
    assert torch.equal(both_ways(codec, loud)[:, 0][..., others], calm)


@pytest.mark.parametrize("name", LOSSY)
def test_chunk_takes_no_more_room_than_it_should(name: str) -> None:
    most = {"fp8": 0.52, "int8": 0.52, "int4": 0.32}[name]
    raw = make_codec("raw", 3, 64, torch.bfloat16).row_bytes(512)
    assert make_codec(name, 3, 64, torch.bfloat16).row_bytes(512) <= most * raw


def test_fp8_is_read_as_pytorch_reads_it() -> None:
    """Every e4m3 number there is, by the bits."""
    bits = torch.arange(256, dtype=torch.uint8)
    numbers = bits.view(torch.float8_e4m3fn)
    finite = numbers.float().isfinite()
    codec = make_codec("fp8", 1, 256, torch.float32)
    row = codec.encode(torch.zeros(1, 2, 1, 1, 256))[0]
    _, key_scale, value_scale, keys, values = codec._split(row, 1)  # type: ignore[attr-defined]
    key_scale.fill_(2.0**8)
    value_scale.fill_(2.0**8)
    keys.copy_(numbers.view(1, 1, 256))
    values.copy_(numbers.view(1, 1, 256))
    key, value = torch.empty(1, 1, 256), torch.empty(1, 1, 256)
    codec.decode(row, 1, key, value)
    for found in (key, value):
        assert torch.equal(found[0, 0, finite], numbers.float()[finite])


def test_unknown_codec_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'int3'; there are fp8, int4, int8, raw"):
        make_codec("int3", 1, 8, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALL)
def test_encoding_leaves_the_kv_it_was_given(name: str, dtype: torch.dtype) -> None:
    with torch.inference_mode():  # as the engine makes it; it is encoded in another thread
        kv = torch.randn(2, 2, 8, 1, 8).to(dtype)
        kv[0, 0, 0] = torch.finfo(dtype).max
        before = kv.clone()
    make_codec(name, 1, 8, dtype).encode(kv)
    assert kv.equal(before)
