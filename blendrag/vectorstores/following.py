"""``sync``: the KV of what a vector store of another program holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from blendrag.errors import ConfigError, SourceError
from blendrag.names import closest
from blendrag.progress import SILENT, Notes, Progress, progress_bar
from blendrag.serving.collection import KeptDocuments, SyncReport
from blendrag.text import encodable
from blendrag.vectorstores.interface import (
    TEXT_FIELDS,
    Address,
    Fields,
    VectorStore,
    failures,
    open_store,
    text_of,
)

_LONGEST = 1 << 20  # characters of a text; servers take twice as many
_BEHIND_ID = "#"


@dataclass(slots=True, kw_only=True)
class StoreReport(SyncReport):
    """A report of what a vector store held, in rows. textless, too_large: rows left out, without a text or
    with one of more than a million characters."""

    textless: int = 0
    too_large: int = 0


def sync(
    store: str | Address | VectorStore,
    kept: KeptDocuments,
    *,
    text_field: str | None = None,
    progress: Progress | bool | None = None,
) -> StoreReport:
    """Have a collection keep the KV of exactly the texts that a vector store holds.

    May be interrupted and repeated: a text that is known by its content is not sent again. What has left the
    store is released at last, and only if all of it could be read.

    store: a URL as in ``qdrant://localhost/handbook``, or a store that is open. kept: for this store alone,
    as in ``RemoteChat(url).collection("handbook")``. text_field: the field of the text, within others by
    dots; by default those of the usual frameworks. progress: None shows a bar if someone is watching.
    Raises ConfigError for a wrong URL, name or field, MissingDependencyError without the store's client,
    SourceError for a store that fails, and what ``kept.add`` does.
    """
    where = Address.read(store) if isinstance(store, str) else store
    with (
        contextlib.nullcontext(where) if isinstance(where, VectorStore) else open_store(where) as opened,
        progress_bar(progress) as bar,
    ):
        # A name stands for an id and a text: what a collection keeps says what is new, and what was done
        # before an interrupt.
        report, known = StoreReport(), kept.ids()
        left, known_ids, met, fields = set(known), set(map(_id, known)), set[str](), set[str]()
        for page in read(opened, where, bar):
            found: dict[str, list[str]] = {}
            for id, row in page:
                if (text := text_of(row, text_field)) is None:
                    report.textless += 1
                    fields |= row.keys()
                elif len(text) > _LONGEST:
                    report.too_large += 1
                else:
                    found[_name(id, text)] = [text]
            new = {name: texts for name, texts in found.items() if name not in known}
            if new:
                report.count(kept.add(new, progress=Notes(bar.note)))
                known |= new.keys()
            left -= found.keys()
            met |= set(map(_id, found))
            report.changed += (changed := len(known_ids.intersection(map(_id, new))))
            report.added += len(new) - changed
            report.unchanged += len(found) - len(new)
        if report.textless and not met:
            raise ConfigError(_no_text(where, text_field, fields))
        report.count(kept.add({}, progress=Notes(bar.note)))  # what an earlier run left to prefill
        kept.remove(left)
        report.removed = len(set(map(_id, left)) - met)
        return report


def read(
    store: VectorStore, where: Address | VectorStore | None = None, bar: Progress = SILENT
) -> Iterator[list[tuple[str, Fields]]]:
    """Yield the pages of a store. where: what errors call it.

    Raises ConfigError if there is no such collection, SourceError if the store fails.
    """
    where = where or store
    bar.note("reading the store")
    try:
        with failures(where):
            with contextlib.suppress(Exception):  # it takes too long, or the pages fail as well
                bar.total(store.count())
            for page in store.pages():
                yield page
                bar.advance(len(page))
                bar.note("reading the store")
    except SourceError:
        names = [store.collection]
        with contextlib.suppress(Exception):  # a key may be for one collection only
            names = list(store.names())
        if store.collection not in names:
            near = closest(store.collection, names)
            raise ConfigError(f"{where}: there is no such collection{near}") from None
        raise


def _name(id: str, text: str) -> str:
    return f"{encodable(id)}{_BEHIND_ID}{xxhash.xxh3_128_hexdigest(encodable(text.strip()).encode())}"


def _id(name: str) -> str:
    return name.rpartition(_BEHIND_ID)[0]


def _no_text(where: Address | VectorStore, named: str | None, fields: set[str]) -> str:
    there = ", ".join(sorted(fields)[:20]) or "none"
    wanted = f"a text in {named!r}" if named else f"a text in any of {', '.join(TEXT_FIELDS)}"
    return f"{where}: no row has {wanted}; fields are {there}{closest(named or '', fields)}: name the text's"
