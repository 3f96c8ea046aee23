"""The collection of garbage: give back the disk space that nothing needs any more."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from blendrag.files.sqlite import compact
from blendrag.progress import SILENT, Progress
from blendrag.store.maintenance.closed_index import (
    DATABASES,
    SHARDS,
    ClosedIndex,
    RecordFolder,
    layout_of,
    not_mounted,
    record_folders,
    remove,
)
from blendrag.store.stack import OWN_FOLDER, TierSpec, primary_at
from blendrag.store.tiers import Context, DiskTier, TierError, make_tier


@dataclass(slots=True)
class Freed:
    """The files and bytes that were freed, by kind: "doomed" (their deletion was decided), "orphan" (the
    catalogue does not want them), "half-written", "quarantined"; and bytes that the databases gave back.

    left: chunks whose deletion was decided, but which are in a tier that cannot be written or reached now. A
    server's bytes are not known.
    """

    files: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    left: int = 0

    @property
    def total(self) -> int:
        """Return the bytes of all kinds."""
        return sum(self.bytes.values())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"total": self.total}

    def add(self, kind: str, size: int) -> None:
        self.files[kind] = self.files.get(kind, 0) + 1
        self.bytes[kind] = self.bytes.get(kind, 0) + size


def collect(index: ClosedIndex, stack: Sequence[TierSpec] = OWN_FOLDER, progress: Progress = SILENT) -> Freed:
    """Remove what is of no use, and compact the databases. What can still be used stays; so do the rows of
    evicted chunks, whose documents still serve answers. A folder that other indexes may share loses no record
    but those whose deletion was decided here.

    Raises StoreError if a file cannot be removed, StoreFullError if there is no room to compact a database
    in (files are gone by then), ConfigError for a tier that cannot be used as it is described.
    """
    freed = Freed()
    progress.note("removing files")
    doomed = set(index.catalogue.doomed())
    freed.left = _bury(index, stack, doomed, freed)
    for shard in SHARDS:
        records = index.kv.records(shard)
        useless = set(records) - index.catalogue.ready_from(shard)
        useless -= index.catalogue.pending_among(useless)
        for key in sorted(useless):
            remove(index.kv.path(key))
            freed.add("doomed" if key in doomed else "orphan", records[key])
    for folder in {index.kv, *record_folders(index, stack)}:
        _sweep(folder, freed)
    for name in DATABASES:
        if (index.root / name).is_file():
            progress.note(f"compacting {name}")
            if size := compact(index.root / name):
                freed.bytes[name] = size
    return freed


def _bury(index: ClosedIndex, stack: Sequence[TierSpec], doomed: set[str], freed: Freed) -> int:
    """Delete doomed records from wherever they may be; if their chunk is still known, only from the primary
    tier. Returns how many are left."""
    released = doomed - index.catalogue.known(doomed)
    primary, left = primary_at(stack), set[str]()
    for at, spec in enumerate(stack):
        if spec.kind != "ram" and spec.writes != "never":
            left |= _delete(index, spec, doomed if at == primary else released, freed)
    index.catalogue.buried(doomed - left)
    return len(left)


def _delete(index: ClosedIndex, spec: TierSpec, keys: set[str], freed: Freed) -> set[str]:
    """Delete records from a tier. Returns those of ``keys`` that it still has, or may have."""
    layout = layout_of(index.catalogue)
    if not keys or layout is None:
        return set()
    if not_mounted(spec):
        return keys
    unlimited = spec.model_copy(update={"bytes": None, "chunks": None})
    tier = make_tier(unlimited, layout, Context(index.kv.root))
    with contextlib.closing(tier):
        try:
            there = tier.has(keys)
            sizes = {key: tier.path(key).stat().st_size if isinstance(tier, DiskTier) else 0 for key in there}
            tier.delete(keys)
            left = tier.has(there)
        except TierError:
            return keys
    for key in there - left:
        freed.add("doomed", sizes[key])
    return left


def _sweep(folder: RecordFolder, freed: Freed) -> None:
    for kind, files in (("half-written", folder.temporary()), ("quarantined", folder.quarantined())):
        for path, size in files:
            remove(path)
            freed.add(kind, size)
