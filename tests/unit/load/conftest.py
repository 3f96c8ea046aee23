"""A model of twelve layers, three chunks of it in a store, and a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blendrag.load.loader import Filled, LayerLoader, LoadSpan, StoredLayers, own_rows
from blendrag.load.trace import Trace
from blendrag.store.identity import KVIdentity
from blendrag.store.kv_store import KVStore
from blendrag.store.record import NO_DRAFTS, DraftLayers
from blendrag.store.tiers import Opened, TierSpec
from device import DEVICE
from stores import Chunk, filled_stack, make_chunk, wanted

DEEP = KVIdentity("deep", "weights-1", "bfloat16", num_layers=12, num_kv_heads=2, head_size=8)
TOKENS = (5, 40, 9)
HERE = torch.device(DEVICE)


class Bench:
    """chunks: all in the store's disk tier, and in RAM if there is any. drafts: their last layers."""

    def __init__(
        self, root: Path, codec: str, ram: int, dtype: str = "bfloat16", drafts: DraftLayers = NO_DRAFTS
    ) -> None:
        identity = replace(DEEP, codec=codec, dtype=dtype)
        self.root = root
        kind = getattr(torch, dtype)
        self.chunks = [make_chunk(n, tokens, kind, identity, drafts) for n, tokens in enumerate(TOKENS)]
        stack = (TierSpec(kind="ram", bytes=ram), TierSpec(kind="disk"))
        self.store: KVStore = filled_stack(root, self.chunks, *stack, identity=identity, dtype=dtype)
        self._loader = LayerLoader(in_flight=4)
        self.trace = Trace()
        self._opened: list[Opened] = []

    def open(self, *chunks: Chunk) -> list[Opened]:
        found = self.store.open_records(wanted(*(chunks or self.chunks)))
        opened = [one for one in found if isinstance(one, Opened)]
        self._opened += opened
        return opened

    def load(
        self,
        opened: Sequence[Opened],
        lengths: Sequence[int] = TOKENS,
        in_flight: int = 4,
        filled: Filled | None = None,
        device: torch.device = HERE,
        drafts: DraftLayers = NO_DRAFTS,
    ) -> StoredLayers:
        self._loader._in_flight = in_flight
        spans = [
            LoadSpan(one, length, own_rows(one.head) if filled and self.store.replicas.wants(one) else None)
            for one, length in zip(opened, lengths, strict=False)
        ]
        return self._loader.load(spans, self.store.layout, device, self.trace, filled, drafts)

    def finish(self) -> None:
        """Until the loader's thread has nothing left to do, nor the one behind it."""
        self._loader.thread.submit(lambda: None).result(timeout=30)
        self.store.wait()

    def close(self) -> None:
        self._loader.thread.shutdown()
        self.store.close_records(self._opened)
        self.store.close()


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    made = []

    def make(codec: str = "raw", ram: int = 0, dtype: str = "bfloat16", **more: Any) -> Bench:
        made.append(Bench(tmp_path / codec, codec, ram, dtype, **more))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    return make_bench()
