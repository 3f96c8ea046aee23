"""Verification: is every record as it was written, and does the catalogue say what is there?"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from blendrag.errors import StoreError
from blendrag.files.hnsw import broken
from blendrag.files.sqlite import check
from blendrag.progress import SILENT, Progress
from blendrag.store.maintenance.closed_index import (
    DATABASES,
    SHARDS,
    ClosedIndex,
    RecordFolder,
    number_in,
    record_folders,
    remove,
)
from blendrag.store.record import DamagedError, Layout
from blendrag.store.stack import OWN_FOLDER, TierSpec
from blendrag.store.tiers import DiskTier, Opened, Read, Tier, TierError

ProblemKind = Literal["damaged", "missing", "orphan", "half-written", "stranger", "database", "vectors"]

_LISTED = 1000
_AT_ONCE = 4 << 20  # bytes in memory

# Of Chroma: the rows of our collection.
_ROWS = (
    "SELECT COUNT(*) FROM embeddings JOIN segments ON segments.id = segment_id"
    " JOIN collections ON collections.id = collection WHERE name = 'chunks'"
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that was found. damaged: the record's bytes are not those that were written. missing: the
    catalogue says a record is there, and it is not. orphan: a record is there, and the catalogue does not
    want it. half-written: a process died writing it. stranger: not a file of the store. database: an SQLite
    file itself is damaged. vectors: rows or files are not in the vector store, so none is found."""

    kind: ProblemKind
    name: str
    detail: str


@dataclass(slots=True)
class VerifyReport:
    """The result of a verification. records, bytes: read and found sound. doomed: files whose deletion is
    decided and still to be done. quarantined: damaged records put aside before. foreign: records in a shared
    folder that this index does not want, and another one may. elsewhere: chunks that only other tiers have,
    which are not read here. unasked: chunks that another tier may have, which could not be asked. repaired:
    problems that were dealt with. counts: problems by kind; problems: the first thousand."""

    records: int = 0
    bytes: int = 0
    doomed: int = 0
    quarantined: int = 0
    foreign: int = 0
    elsewhere: int = 0
    unasked: int = 0
    repaired: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Return how many problems are still there. A stranger is reported, but does no harm."""
        return self.counts.total() - self.counts["stranger"] - self.repaired

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"counts": dict(self.counts)}


class Verifier:
    """A verifier that reads every record of an index once, a few layers at a time. Memory does not grow with
    the index.

    stack: where its KV is; own folder and primary tier are read. others: tiers that may have what is in
    neither.
    repair: damaged records are put aside, orphans and half-written files deleted, and chunks whose KV is gone
    made pending, so that the next ingest prefills them. Strangers and databases are left alone.
    """

    def __init__(
        self,
        index: ClosedIndex,
        others: Collection[Tier] = (),
        *,
        stack: Sequence[TierSpec] = OWN_FOLDER,
        progress: Progress = SILENT,
        repair: bool = False,
    ) -> None:
        self._index, self._others, self._progress, self._repair = index, others, progress, repair
        self._catalogue = index.catalogue
        self._report = VerifyReport()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        dtype = self._catalogue.dtype or "float32"  # None: no engine has written, every record is an orphan
        layout = Layout(self._catalogue.identity, dtype)
        self._folders = {
            folder: DiskTier(TierSpec(kind="disk"), layout, folder.root)
            for folder in record_folders(index, stack)
        }

    def run(self) -> VerifyReport:
        """Verify the index. Raises StoreError if a file cannot be removed, or cannot be read for another
        reason than its contents."""
        report, index = self._report, self._index
        self._progress.total(self._catalogue.totals().bytes)
        for name in DATABASES:
            for line in check(index.root / name):
                self._add("database", name, line)
        self._vectors()
        doomed = set(self._catalogue.doomed())
        report.doomed = len(doomed)
        for shard in SHARDS:
            ready = self._catalogue.ready_from(shard)
            there = [set(folder.records(shard)) for folder in self._folders]
            self._find(ready.difference(*there))
            for folder, keys in zip(self._folders, there, strict=True):
                self._shard(folder, keys, ready, doomed)
        for folder in self._folders:
            self._rest(folder)
        return report

    def _vectors(self) -> None:
        """Compare the number of rows in the vector store with that of the chunks, and look for its files."""
        ledger, chroma = (self._index.root / name for name in DATABASES[1:])
        chunks = number_in(ledger, "SELECT SUM(json_array_length(chunk_keys)) FROM documents")
        if (rows := number_in(chroma, _ROWS)) < chunks:
            self._add("vectors", "chroma", f"{rows:,} of {chunks:,} rows: the next ingest writes the others")
        for folder in broken(chroma.parent):
            self._add("vectors", f"chroma/{folder.name}", "files are lost: remove chroma, ingest again")

    def _rest(self, folder: RecordFolder) -> None:
        """Look at the files that are no records."""
        self._report.quarantined += len(folder.quarantined())
        for path, _ in folder.temporary():
            self._useless("half-written", path.name, path)
        for path in folder.strangers():
            self._add("stranger", str(path.relative_to(folder.root.parent)))

    def _add(self, kind: ProblemKind, name: str, detail: str = "") -> None:
        self._report.counts[kind] += 1
        if len(self._report.problems) < _LISTED:
            self._report.problems.append(Problem(kind, name, detail))

    def _useless(self, kind: ProblemKind, name: str, path: Path) -> None:
        self._add(kind, name)
        if self._repair:
            remove(path)
            self._report.repaired += 1

    def _shard(self, folder: RecordFolder, there: set[str], ready: set[str], doomed: set[str]) -> None:
        # The process died after writing it, before the catalogue knew: the next opening takes it in.
        pending = self._catalogue.pending_among(there - ready)
        orphans = there - ready - pending - doomed
        if folder.shared:
            self._report.foreign += len(orphans)
            orphans = set()
        for key in sorted(orphans):
            self._useless("orphan", key, folder.path(key))
        expected = sorted((there & ready) | pending)
        for at, key in enumerate(expected):
            for following in expected[at + 1 : at + 2]:
                _read_ahead(folder.path(following))
            try:
                nbytes = self._read(self._folders[folder], key)
            except DamagedError as error:
                self._add("damaged", key, str(error).partition(": ")[2])
                if self._repair:
                    self._put_aside(folder, key)
                continue
            self._report.records += 1
            self._report.bytes += nbytes

    def _put_aside(self, folder: RecordFolder, key: str) -> None:
        self._folders[folder].quarantine(key)
        if folder.path(key).exists():
            raise StoreError(f"cannot put {str(folder.path(key))!r} aside: allow this user to write there")
        self._requeue([key])

    def _find(self, keys: set[str]) -> None:
        """Look for ready chunks that are in none of the folders."""
        left = sorted(keys)
        for tier in self._others:
            try:
                there = tier.has(left) if left else set()
            except TierError:
                self._report.unasked += len(left)
                return
            left = [key for key in left if key not in there]
        self._report.elsewhere += len(keys) - len(left)
        for key in left:
            self._add("missing", key)
        self._requeue(left)

    def _requeue(self, keys: Collection[str]) -> None:
        if self._repair:
            self._catalogue.mark(keys, "pending")
            self._report.repaired += len(keys)

    def _read(self, tier: DiskTier, key: str) -> int:
        """Read a record, and return its bytes. Raises DamagedError."""
        opened = tier.open([key]).get(key)
        if isinstance(opened, DamagedError):
            raise opened
        if not isinstance(opened, Opened):
            raise StoreError(f"cannot read {str(tier.path(key))!r}: {opened or 'it has vanished'}")
        head = opened.head
        try:
            count, row = head.num_rows, head.row_bytes
            group = max(1, _AT_ONCE // row)  # rows
            if self._buffer.numel() < min(group, count) * row:
                self._buffer = torch.empty(min(group, count) * row, dtype=torch.uint8)
            for first in range(0, count, group):
                last = min(first + group, count)
                into = self._buffer[: (last - first) * row].view(-1, row)
                (rows,) = tier.read([Read(opened, first, last, into)])
                head.verify(first, rows)
                self._progress.advance(rows.numel())
        except TierError as error:
            raise StoreError(f"cannot read {str(tier.path(key))!r}: {error}") from error
        finally:
            tier.close_record(opened)
        return head.nbytes


def _read_ahead(path: Path) -> None:
    """Have the disk read the next record while this one's checksums are computed."""
    with contextlib.suppress(OSError, AttributeError), path.open("rb") as file:  # not on every system
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
