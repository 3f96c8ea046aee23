"""The cost of a codec: how small, how exact and how fast, on KV that the model has made."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from blendrag.lab.scratch import ScratchStore
from blendrag.store.codec import Codec
from blendrag.store.record import Layout

EXACT = "raw"
_READ_BACK = 6  # chunks whose KV every codec is measured on
_BEST_OF = 5


@dataclass(frozen=True, slots=True)
class CodecCost:
    """The cost of a codec. k_error, v_error: norm of the difference by norm, mean over chunks and layers.
    encode_gb_s, decode_gb_s: 10^9 bytes of KV as the model has it, by one thread. kl_from_exact: by arm, of
    its first tokens against those with the codec ``EXACT``."""

    bytes_per_token: float
    k_error: float
    v_error: float
    encode_gb_s: float
    decode_gb_s: float
    kl_from_exact: dict[str, float] = field(default_factory=dict)


def measure_codecs(names: Sequence[str], exact: ScratchStore, dtype: str) -> dict[str, CodecCost]:
    """Return per codec its cost on the KV in ``exact``, a store with the codec ``EXACT``; dtype: the
    engine's."""
    records = exact.read_back(exact.chunks[:_READ_BACK], dtype)
    layouts = {name: Layout(replace(exact.identity, codec=name), dtype) for name in names}
    return {name: measure_codec(layout.codec, records) for name, layout in layouts.items()}


def measure_codec(codec: Codec, records: Sequence[torch.Tensor]) -> CodecCost:
    """Measure a codec on KV as the model made it, each [layers, 2, tokens, heads, size]."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the thread that loads
    try:
        kv = records[0]
        layers, _, tokens = kv.shape[:3]
        encode_s, rows = _best(lambda: codec.encode(kv))
        into = torch.empty_like(kv)
        decode_s, _ = _best(lambda: _decode(codec, rows, into))
        key, value = np.mean([_errors(codec, each) for each in records], axis=0)
    finally:
        torch.set_num_threads(threads)
    return CodecCost(
        bytes_per_token=layers * codec.row_bytes(tokens) / tokens,
        k_error=float(key),
        v_error=float(value),
        encode_gb_s=kv.nbytes / encode_s / 1e9,
        decode_gb_s=kv.nbytes / decode_s / 1e9,
    )


def _decode(codec: Codec, rows: torch.Tensor, into: torch.Tensor) -> None:
    for row, (key, value) in zip(rows, into, strict=True):
        codec.decode(row, into.shape[2], key, value)


def _errors(codec: Codec, kv: torch.Tensor) -> list[float]:
    """Return the relative error of K and of V, mean over layers."""
    found = torch.empty_like(kv)
    _decode(codec, codec.encode(kv), found)
    exact = kv.float().flatten(2)
    ratio: list[float] = ((found.float().flatten(2) - exact).norm(dim=2) / exact.norm(dim=2)).mean(0).tolist()
    return ratio


def _best(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the least seconds of this thread, and the result. The first run is a warm-up."""
    result, times = work(), []
    for _ in range(_BEST_OF):
        begin = time.thread_time()
        result = work()
        times.append(time.thread_time() - begin)
    return min(times), result
