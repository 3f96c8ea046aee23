"""How fast records are read through the store, against the same files read as raw bytes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from blendrag.lab.cold import drop_page_cache
from blendrag.lab.statistics import spread
from blendrag.store.record import Layout
from blendrag.store.tiers import DiskTier, Opened, Read, TierSpec

_BLOCK = 1 << 20  # bytes of a raw read, as `dd bs=1M`
_REPEATS = 7


def reading_speed(folder: Path, layout: Layout) -> dict[str, dict[str, float]]:
    """Read all records in ``folder`` (of a disk tier), cold: bytes per second of both ways, and their ratio.

    Through the store means: opened, by layers in the group that the loader takes, every checksum compared.
    """
    tier = DiskTier(TierSpec(kind="disk", write="never"), layout, folder)
    keys = sorted(path.stem for path in folder.glob("??/*.safetensors"))
    paths = [tier.path(key) for key in keys]
    size = sum(path.stat().st_size for path in paths)
    ways: dict[str, Callable[[], None]] = {
        "raw": lambda: _read_raw(paths),
        "store": lambda: _read_records(tier, layout, keys),
    }
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(_REPEATS + 1):
        for name in ways if number % 2 else reversed(ways):
            drop_page_cache(folder)
            begin = time.perf_counter()
            ways[name]()
            if number:
                speeds[name].append(size / (time.perf_counter() - begin))
    ratios = [store / raw for store, raw in zip(speeds["store"], speeds["raw"], strict=True)]
    return {name: spread(values) for name, values in (*speeds.items(), ("store / raw", ratios))}


def _read_raw(paths: Sequence[Path]) -> None:
    buffer = bytearray(_BLOCK)
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        while os.readv(descriptor, [buffer]):
            continue
        os.close(descriptor)


def _read_records(tier: DiskTier, layout: Layout, keys: Sequence[str]) -> None:
    for key, opened in tier.open(keys).items():
        assert isinstance(opened, Opened), key
        into = torch.empty(1, opened.head.row_bytes, dtype=torch.uint8)
        for layer in range(layout.num_layers):
            (rows,) = tier.read([Read(opened, layer, layer + 1, into)])
            opened.head.verify(layer, rows)
        tier.close_record(opened)
