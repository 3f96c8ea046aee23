"""Collect garbage: give back the disk space that nothing needs any more."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blendrag.store.care.folder import ClosedIndex
from blendrag.store.care.manifest import DATABASES
from blendrag.store.care.progress import SILENT, CareProgress
from blendrag.store.care.sqlite import compact


@dataclass(slots=True)
class Freed:
    """Files and bytes by what they were: "doomed" (their deletion was decided), "orphan" (the catalogue does
    not want them), "half-written", "quarantined"; and bytes that the databases gave back."""

    files: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.bytes.values())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"total": self.total}

    def add(self, kind: str, size: int) -> None:
        self.files[kind] = self.files.get(kind, 0) + 1
        self.bytes[kind] = self.bytes.get(kind, 0) + size


def collect(index: ClosedIndex, progress: CareProgress = SILENT) -> Freed:
    """Remove what is of no use, and compact the databases. What can still be used stays; so do the rows of
    evicted chunks, whose documents are still answered from.

    Raises StoreFullError if there is no room to compact a database in; files are gone by then.
    """
    freed = Freed()
    progress.note("removing files")
    doomed = set(index.catalogue.doomed())
    for shard, records in index.shards():
        useless = set(records) - index.catalogue.ready_from(shard)
        useless -= index.catalogue.pending_among(useless)
        for key in sorted(useless | (records.keys() & doomed)):
            _remove(index.path(key), "doomed" if key in doomed else "orphan", records[key], freed)
    index.catalogue.buried(doomed)
    for path, size in index.temporary():
        _remove(path, "half-written", size, freed)
    for path, size in index.quarantined():
        _remove(path, "quarantined", size, freed)
    for name in DATABASES:
        if (index.root / name).is_file():
            progress.note(f"compacting {name}")
            if size := compact(index.root / name):
                freed.bytes[name] = size
    return freed


def _remove(path: Path, kind: str, size: int, freed: Freed) -> None:
    path.unlink(missing_ok=True)
    freed.add(kind, size)
