"""Purge: a document leaves every place it was copied to, and those copies are overwritten."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from blendrag.errors import SourceError, StoreError
from blendrag.files import sqlite
from blendrag.files.paths import absolute
from blendrag.index.ingest import DocumentPipeline
from blendrag.serving.library import Library
from blendrag.serving.owners import document_of, readable, with_repeats
from blendrag.store.maintenance.closed_index import disk_errors, not_mounted, other_tiers
from blendrag.store.primary import delete_from
from blendrag.store.tiers.disk import QUARANTINE, SUFFIX


@dataclass(frozen=True, slots=True)
class Purged:
    """A report of what a purge removed. chunks: with their KV. vectors: rows of the vector store. tiers:
    names of those that were cleared besides the index's own folder. shared: chunks that stay, as other
    documents have them too."""

    source: str
    chunks: int
    shared: int
    vectors: int
    tiers: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def purge(source: str, library: Library, pipeline: DocumentPipeline) -> Purged:
    """Purge a document. Other tiers come first: if one cannot be reached, nothing has changed here, and the
    call can be repeated.

    Raises SourceError for an unknown document, with the closest name; StoreError.
    """
    catalogue, session = library.catalogue, library.session
    # A purge that was interrupted has left its document in the catalogue only.
    source = find_source(source, pipeline.ledger.sources() | set(catalogue.owners()))
    leaving = with_repeats(catalogue, [source])
    owned = {key for owner in leaving for key in catalogue.owners(owner).get(owner, ())}
    keys = catalogue.only_of(*leaving)
    stack = [spec for spec in library.settings.stack if spec.writes != "never"]
    if store := session.store:
        unreachable = list(store.delete(keys, everywhere=True).unreachable)
        tiers = [spec.label for spec in stack]
    elif away := [spec.label for spec in stack if catalogue.dtype and not_mounted(spec)]:
        unreachable, tiers = away, []
    else:
        with other_tiers(catalogue, stack) as others:
            unreachable = [tier.name for tier in others if delete_from(tier, keys) is None]
            tiers = [tier.name for tier in others]
    if unreachable:
        raise StoreError(
            f"nothing was purged here, because {', '.join(unreachable)} cannot be reached: try again,"
            " or take it out of the setting tiers if it is gone for good"
        )
    pipeline.ledger.forget(source)
    rows = pipeline.vectors.purge(source)
    library.texts.drop(pipeline.remove(source))
    kv = library.root / "kv"
    with disk_errors(f"cannot delete from {str(kv)!r}"):
        for key in keys:
            for folder in (kv / key[:2], kv / QUARANTINE):  # damaged ones are made of the same text
                (folder / f"{key}{SUFFIX}").unlink(missing_ok=True)
    catalogue.buried(keys)
    for name in ("catalogue.sqlite", "ledger.sqlite", "tree/catalogue.sqlite"):
        if (library.root / name).is_file():
            sqlite.compact(library.root / name)
    return Purged(source, len(keys), len(owned) - len(keys), rows, tuple(tiers))


def find_source(name: str, sources: Collection[str]) -> str:
    """Return the document that is called so, with or without its collection, or whose path this is from here.
    Raises SourceError."""
    path = os.path.expanduser(name)
    for candidate in (name, absolute(path), os.path.realpath(path)):
        if candidate in sources:
            return candidate
    for called, shown in ((readable, repr), (document_of, readable)):
        found = [source for source in sources if called(source) == name]
        if len(found) == 1:
            return found[0]
        if found:
            several = ", ".join(sorted(map(shown, found)))
            raise SourceError(f"several collections have {name!r}: {several}: name one of them")
    real = os.path.realpath(path)
    same = [source for source in sources if os.path.isabs(source) and os.path.realpath(source) == real]
    if len(same) == 1:
        return same[0]
    names = [os.path.relpath(source) if os.path.isabs(source) else source for source in sources]
    close = difflib.get_close_matches(name, map(readable, [*names, *sources]), n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise SourceError(f"no document {name!r} in this index{hint}")
