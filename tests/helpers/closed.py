"""A closed index of four chunks, what its care finds and frees there, and ways to harm it."""

from __future__ import annotations

from pathlib import Path

from blendrag.store.maintenance.closed_index import closed_index
from blendrag.store.maintenance.gc import Freed, collect
from blendrag.store.maintenance.verify import Verifier, VerifyReport
from blendrag.store.record import Record
from blendrag.store.stack import OWN_FOLDER
from blendrag.store.tiers import Tier, TierSpec
from stores import A, B, C, D, filled_stack

DISK = TierSpec(kind="disk")


def filled(root: Path) -> Path:
    filled_stack(root, [A, B, C, D], DISK).close()
    return root


def verified(root: Path, *others: Tier, repair: bool = False) -> VerifyReport:
    with closed_index(root) as index:
        return Verifier(index, others, repair=repair).run()


def collected(root: Path, *stack: TierSpec) -> Freed:
    with closed_index(root) as index:
        return collect(index, stack or OWN_FOLDER)


def found(report: VerifyReport) -> dict[str, list[str]]:
    kinds: dict[str, list[str]] = {}
    for problem in report.problems:
        kinds.setdefault(problem.kind, []).append(problem.name)
    assert report.counts == {kind: len(names) for kind, names in kinds.items()}
    return kinds


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def write_record(root: Path, record: Record) -> Path:
    path = root / "kv" / record.key[:2] / f"{record.key}.safetensors"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(record.bytes())
    return path
