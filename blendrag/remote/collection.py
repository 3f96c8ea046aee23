"""The documents of one vector store, whose KV a server keeps."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any
from urllib.parse import quote_plus

import xxhash

from blendrag.errors import (
    BlendragError,
    ConfigError,
    ServerBusyError,
    ServerError,
    ServerRefusalError,
    StoreFullError,
)
from blendrag.progress import Progress, progress_bar
from blendrag.remote.http import NoCollectionError, Server, made, understood
from blendrag.serving.collection import KeptDocuments, Sources, SyncReport, Texts, encodable_documents
from blendrag.serving.owners import ends_here
from blendrag.text import encodable

# As the server takes it; "." and ".." would be other places than a name's.
_NAME = re.compile(r"(?!\.{1,2}$)[\w.-]{1,128}", re.ASCII)
_ADDRESS = 4 << 10  # characters of ids in one address; servers and gateways take 8 KiB in all
_AT_ONCE = 256 << 10  # characters of documents in one request
_AT_EXIT_S = 3.0
_WAITS = 60  # for one request: five minutes, of five seconds each as our servers say
_LONGEST_WAIT_S = 60.0
_UNTOLD_WAITS, _UNTOLD_WAIT_S = 6, 5.0  # where a gateway does not say how long
_ERRORS: dict[int, type[BlendragError]] = {400: ConfigError, 503: ServerBusyError, 507: StoreFullError}


class RemoteCollection(KeptDocuments):
    """A collection on a server, under ``/v1/kb/collections``. What a client does not wait for any more, the
    server goes on with."""

    def __init__(self, server: Server, name: str) -> None:
        self._server, self.name = server, encodable(name)
        self._path = f"v1/kb/collections/{_as_path(self.name)}"

    def ids(self) -> set[str]:
        try:
            found = self._server.call("GET", self._path)
        except NoCollectionError:  # as one without any
            return set()
        with understood(self._server):
            return set(found["ids"])

    def _keep(
        self, documents: Texts, sources: Sources | None, progress: Progress | bool | None, *, only: bool
    ) -> SyncReport:
        if ends_here(self.name):
            _forget_at_exit(self._server, self.name, os.getpid())
        texts, sources = encodable_documents(documents, sources)
        report, parts = SyncReport(), list(_parts(texts, sources))
        with progress_bar(progress) as bar:
            if len(parts) > 1 or not only:
                for part, parts_of in parts:
                    self._count(report, self._put({"documents": part, "sources": parts_of}, bar))
            if only:
                self._forget_others(texts, sources, report, bar, put=len(parts) > 1)
        report.unchanged = len(texts) - report.added - report.changed
        return report

    def _forget_others(
        self, texts: Texts, sources: Sources, report: SyncReport, bar: Progress, *, put: bool
    ) -> None:
        """Forget other documents: in one request with all documents, which is one change for the server; or,
        where it takes none so large, in several. put: whether these have been put."""
        named = {id: source for id, source in sources.items() if id in texts}
        try:
            self._count(report, self._put({"documents": texts, "sources": named, "sync": True}, bar))
        except ServerRefusalError:
            if not put:
                raise
            gone = self.ids() - texts.keys()
            self.remove(gone)
            report.removed += len(gone)

    @staticmethod
    def _count(report: SyncReport, done: SyncReport) -> None:
        report.count(done)
        report.added += done.added
        report.changed += done.changed
        report.removed += done.removed

    def remove(self, ids: Iterable[str]) -> None:
        part: list[str] = []
        size = 0
        for id in map(encodable, ids):
            more = len(f"&id={quote_plus(id)}")
            if part and size + more > _ADDRESS:
                self._forget(params={"id": part})
                part, size = [], 0
            part.append(id)
            size += more
        if part:
            self._forget(params={"id": part})

    def clear(self) -> None:
        self._forget()

    def _forget(self, **which: Any) -> None:
        with contextlib.suppress(NoCollectionError):  # as one without any
            self._server.call("DELETE", self._path, **which)

    def _put(self, body: Mapping[str, Any], bar: Progress) -> SyncReport:
        """Put documents. Waits for a server that is busy: as it says, or else a moment."""
        for waits in range(_WAITS):
            try:
                return self._put_once(body, bar)
            except ServerBusyError as error:
                after = error.retry_after_s
                if after is None and (waits >= _UNTOLD_WAITS or error.__cause__):  # or the connection broke
                    raise
                bar.note("waiting for the server")
                time.sleep(_UNTOLD_WAIT_S if after is None else min(after, _LONGEST_WAIT_S))
        return self._put_once(body, bar)

    def _put_once(self, body: Mapping[str, Any], bar: Progress) -> SyncReport:
        line: dict[str, Any] = {}
        with self._server.answer("PUT", self._path, body) as response:
            done = total = 0
            for text in filter(str.strip, response.iter_lines()):
                with understood(self._server):
                    line = dict(json.loads(text))
                    step = (line["doing"], line["total"], line["done"]) if "doing" in line else None
                if step is not None:
                    doing, all_of_it, so_far = step
                    bar.total(all_of_it - total)
                    bar.advance(so_far - done)
                    bar.note(doing)
                    total, done = all_of_it, so_far
        if "error" in line:
            raise _ERRORS.get(line.get("status", 500), ServerError)(f"{self._server}: {line['error']}")
        if "report" not in line:
            raise ServerError(f"{self._server} broke off; it goes on with these documents: add them again")
        with understood(self._server):
            return made(SyncReport, line["report"])


def _parts(texts: Texts, sources: Sources) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """Yield documents few enough for one request each, with the text again that the first of a source is
    prefilled behind."""
    part: dict[str, Any] = {}
    last: dict[str, str] = {}
    size = 0

    def parts_of() -> dict[str, str]:
        return {id: sources[id] for id in part if id in sources}

    for id in texts:
        before = last.get(sources[id]) if id in sources else None
        more = sum(map(len, chain([id], texts[id])))
        if part and size + more > _AT_ONCE:
            yield part, parts_of()
            part, size = {}, 0
        if before is not None and before not in part:
            part[before] = texts[before]
            size += sum(map(len, chain([before], texts[before])))
        part[id] = texts[id]
        size += more
        if id in sources:
            last[sources[id]] = id
    yield part, parts_of()


@functools.cache
def _forget_at_exit(server: Server, name: str, process: int) -> None:
    """Have the server forget what ends with this process, unless that is killed."""

    def forget() -> None:
        if os.getpid() == process:  # and no fork of it
            with contextlib.suppress(BlendragError):
                RemoteCollection(server, name)._forget(timeout=_AT_EXIT_S)

    atexit.register(forget)


def _as_path(name: str) -> str:
    """Return a name, which may be of any kind, as the server's paths have it."""
    if _NAME.fullmatch(name):
        return name
    readable = re.sub(r"[^\w.-]+", ".", name, flags=re.ASCII).strip(".")[-64:]
    return f"{readable}-{xxhash.xxh3_64_hexdigest(name.encode())}"
