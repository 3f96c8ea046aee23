"""Which tiers an index has besides its own folder, and where the files of its home are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from blendrag.store.catalogue import Catalogue
from blendrag.store.home import home_at
from blendrag.store.maintenance.folder import ClosedIndex, RecordFolder
from blendrag.store.record import Layout
from blendrag.store.tiers import Tier, TierError, TierSpec, make_tier

OWN_FOLDER = (TierSpec(kind="disk"),)  # a stack


def record_folders(index: ClosedIndex, stack: Sequence[TierSpec]) -> list[RecordFolder]:
    """The index's own folder, if the stack has it, and the folder of a home elsewhere, if there can be one:
    some engine has written to the index.

    Raises ConfigError for a stack without a home.
    """
    home, dtype = stack[home_at(stack)], index.catalogue.dtype
    folders = [index.kv] if any((spec.kind, spec.path) == ("disk", None) for spec in stack) else []
    if home.path is not None and dtype is not None:
        digest = Layout(index.catalogue.identity, dtype).digest
        folders.append(RecordFolder(home.path.expanduser() / digest, shared=True))
    return folders


@contextlib.contextmanager
def other_tiers(catalogue: Catalogue, stack: Sequence[TierSpec]) -> Iterator[list[Tier]]:
    """Folders and servers of the stack, opened; none if no engine has written to the index yet.

    Raises ConfigError for a tier that cannot be used as it is described.
    """
    own = {("disk", None), ("ram", None)}
    elsewhere = [spec for spec in stack if (spec.kind, spec.path) not in own]
    tiers: list[Tier] = []
    try:
        if elsewhere and catalogue.dtype is not None:
            layout = Layout(catalogue.identity, catalogue.dtype)
            for spec in elsewhere:
                tiers.append(make_tier(spec, layout, Path()))
        yield tiers
    finally:
        for tier in tiers:
            with contextlib.suppress(TierError):
                tier.close()
