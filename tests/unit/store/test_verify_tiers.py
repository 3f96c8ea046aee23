"""verify where it cannot see every file, or there is much to see: other tiers, failing reads, memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from blendrag.errors import StoreError
from blendrag.progress import Progress
from blendrag.store.catalogue import Catalogue
from blendrag.store.maintenance import verify
from blendrag.store.maintenance.closed_index import closed_index
from blendrag.store.maintenance.verify import Verifier
from blendrag.store.tiers import DiskTier, TierError, TierSpec
from closed import found, verified
from stores import IDENTITY, LAYOUT, A, B, make_record, record_of, states


def test_file_that_cannot_be_read_now_is_not_called_damaged(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a repair under a process with too many open files would put every record aside."""

    def refuse(self: DiskTier, keys: list[str]) -> dict[str, TierError]:
        return {key: TierError(f"{key}: Too many open files") for key in keys}

    monkeypatch.setattr(DiskTier, "open", refuse)
    with pytest.raises(StoreError, match="Too many open files"):
        verified(root, repair=True)
    monkeypatch.undo()
    assert (verified(root).records, verified(root).left) == (4, 0)


# -- other tiers ------------------------------------------------------------------------------------------


class Unreachable(DiskTier):
    def has(self, keys: object) -> set[str]:
        raise TierError("gone")


def test_chunk_that_another_tier_has_is_not_missing(root: Path, tmp_path: Path) -> None:
    other = DiskTier(TierSpec(kind="disk"), LAYOUT, tmp_path / "other")
    other.put(make_record(A))
    record_of(root, A.key).unlink()
    assert found(verified(root, other)) == {}
    record_of(root, B.key).unlink()
    assert found(verified(root, other)) == {"missing": [B.key]}


def test_chunks_of_a_tier_that_cannot_be_asked_are_neither_missing_nor_sound(
    root: Path, tmp_path: Path
) -> None:
    record_of(root, A.key).unlink()
    report = verified(root, Unreachable(TierSpec(kind="disk"), LAYOUT, tmp_path / "other"), repair=True)
    assert (report.unasked, report.left, report.records) == (1, 0, 3)
    assert states(root)[A.key] == "ready"


# -- size -------------------------------------------------------------------------------------------------


class Counting(Progress):
    def __init__(self) -> None:
        self.expected, self.done = 0, 0

    def total(self, amount: int) -> None:
        self.expected = amount

    def advance(self, amount: int = 1) -> None:
        self.done += amount


def test_progress_ends_near_what_it_promised(root: Path) -> None:
    progress = Counting()
    with closed_index(root) as index:
        Verifier(index, progress=progress).run()
    heads = 4 * make_record(A).head.begin
    assert progress.done + heads == progress.expected > 0


def test_only_a_thousand_problems_are_listed_and_all_are_counted(tmp_path: Path) -> None:
    catalogue = Catalogue.open(tmp_path, IDENTITY)
    catalogue.settle_dtype("bfloat16")
    catalogue.register("doc", [(f"{n:032x}", "", (n,)) for n in range(1200)])
    for n in range(1200):
        catalogue.mark_ready(f"{n:032x}", 1)
    catalogue.close()
    report = verified(tmp_path)
    assert len(report.problems) == 1000 and report.counts["missing"] == 1200 == report.left


def test_record_is_read_a_few_layers_at_a_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory: one layer of one record at least, and no more than the limit else."""
    monkeypatch.setattr(verify, "_AT_ONCE", 1)
    largest = 0
    empty = torch.empty

    def watched(*shape: object, **options: object) -> torch.Tensor:
        nonlocal largest
        made: torch.Tensor = empty(*shape, **options)  # type: ignore[call-overload]
        largest = max(largest, made.numel())
        return made

    monkeypatch.setattr(torch, "empty", watched)
    assert verified(root).records == 4
    assert largest == make_record(A).head.row_bytes
