"""The speed of each tier, read as the engine reads it: by layers, verified and decoded."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from blendrag.control.profile import TierSpeed
from blendrag.errors import StoreError
from blendrag.lab.scratch import drop_page_cache, temporary_folder
from blendrag.load.loader import IN_FLIGHT, LayerLoader, LoadFailedError, LoadSpan
from blendrag.load.trace import Trace
from blendrag.progress import Progress
from blendrag.settings import Settings
from blendrag.store.identity import KVIdentity
from blendrag.store.record import Layout, Record
from blendrag.store.stack import TierSpec, primary_at
from blendrag.store.tiers import Context, Opened, Tier, TierError, make_tier

_CHUNKS, _TOKENS, _FEW_TOKENS = 6, 512, 1
_REPEATS = 5


def measure_tiers(
    settings: Settings, identity: KVIdentity, dtype: str, progress: Progress
) -> dict[str, TierSpeed]:
    """Read random records through every tier of ``settings.stack``; they are removed afterwards.

    A disk tier's page cache is dropped before each read. A server is asked under a namespace of its own. A
    tier that may not be written is left out. Raises StoreError, naming the tier that cannot be used, and
    ConfigError if none may be written.
    """
    primary_at(settings.stack)
    own = replace(identity, namespace=f"profile-{uuid.uuid4().hex}")
    layout = Layout(own, dtype)
    found: dict[str, TierSpeed] = {}
    for spec in settings.stack:
        if spec.writes != "never":
            progress.note(f"reading from {spec.label}")
            with temporary_folder(settings, spec) as folder:
                found[spec.label] = measure_tier(spec, layout, folder)
        progress.advance()
    return found


def measure_tier(spec: TierSpec, layout: Layout, folder: Path) -> TierSpeed:
    """Measure one tier. folder: where a disk tier keeps its files. Raises StoreError."""
    unlimited = {"bytes": None, "chunks": None, "path": None}
    tier = make_tier(spec.model_copy(update=unlimited), layout, Context(folder))
    few, many = _records(layout, _FEW_TOKENS), _records(layout, _TOKENS)
    try:
        try:
            for record in (*few, *many):
                tier.put(record)
            loader = LayerLoader()
            small = _seconds(loader, tier, layout, few, folder)
            large = _seconds(loader, tier, layout, many, folder)
        finally:
            with contextlib.suppress(TierError):
                tier.delete(record.key for record in (*few, *many))
    except (TierError, LoadFailedError) as error:
        raise StoreError(f"the tier {tier.name!r} cannot be measured: {error}") from error
    finally:
        tier.close()
    group = max(1, min(tier.group, min(IN_FLIGHT, layout.num_layers) // 2))
    calls = 1 + -(-layout.num_layers // group)
    extra = sum(one.head.nbytes for one in many) - sum(one.head.nbytes for one in few)
    return TierSpeed(
        bytes_per_s=extra / max(large - small, 1e-6),
        latency_s=small / calls,
        calls=calls,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _records(layout: Layout, tokens: int) -> list[Record]:
    generator = torch.Generator().manual_seed(tokens)
    shape = (layout.num_layers, 2, tokens, layout.heads, layout.size)
    records = []
    for number in range(_CHUNKS):
        ids = range(number * tokens, (number + 1) * tokens)
        kv = torch.randn(shape, generator=generator).to(layout.dtype)
        records.append(layout.encode(layout.identity.chunk_key(ids), ids, kv))
    return records


def _seconds(
    loader: LayerLoader, tier: Tier, layout: Layout, records: Sequence[Record], folder: Path
) -> float:
    """Return the least time to find and load all records' layers, as for a prompt."""
    taken = []
    for _ in range(1 + _REPEATS):
        drop_page_cache(folder)
        begin = time.perf_counter()
        found = tier.open([record.key for record in records])
        spans = []
        for record in records:
            opened = found.get(record.key)
            if not isinstance(opened, Opened):
                raise TierError(str(opened or "what was written is not there"))
            spans.append(LoadSpan(opened, record.head.tokens))
        with loader.load(spans, layout, torch.device("cpu"), Trace(on=False)) as layers:
            layers.fetch_kv(0)
            for layer in range(layout.num_layers):
                layers.synchronize(layer)
        taken.append(time.perf_counter() - begin)
    return min(taken[1:])
