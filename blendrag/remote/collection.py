"""The documents of one vector store, whose KV a server keeps."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
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
from blendrag.serving.collection import (
    KeptDocuments,
    Sources,
    SyncReport,
    Texts,
    encodable_documents,
    has_text,
)
from blendrag.serving.owners import ends_here
from blendrag.serving.prefill import grouped
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
        several = len(parts) > 1
        with progress_bar(progress) as bar:
            if several or not only:
                for part in parts:
                    self._put(_body(part, sources), report, bar)
            if only:
                # In one request with all documents, which is one change for the server.
                try:
                    self._put({**_body(texts, sources), "sync": True}, report, bar)
                except ServerRefusalError:  # it takes none so large
                    if not several:
                        raise
                    gone = self.ids() - texts.keys()
                    self.remove(gone)
                    report.removed += len(gone)
        report.unchanged = sum(map(has_text, texts.values())) - report.added - report.changed
        return report

    def remove(self, ids: Iterable[str]) -> None:
        for part in grouped(map(encodable, ids), lambda id: len(f"&id={quote_plus(id)}"), _ADDRESS):
            self._forget(params={"id": part})

    def clear(self) -> None:
        self._forget()

    def _forget(self, **which: Any) -> None:
        with contextlib.suppress(NoCollectionError):  # as one without any
            self._server.call("DELETE", self._path, **which)

    def _put(self, body: Mapping[str, Any], report: SyncReport, bar: Progress) -> None:
        """Put documents, and count what is done. Waits for a server that is busy: as it says, or else a
        moment."""
        for waits in itertools.count():
            try:
                done = self._put_once(body, bar)
                break
            except ServerBusyError as error:
                after = error.retry_after_s
                # Where it does not say how long, the connection may have broken, too.
                if waits == _WAITS or (after is None and (waits >= _UNTOLD_WAITS or error.__cause__)):
                    raise
                bar.note("waiting for the server")
                time.sleep(_UNTOLD_WAIT_S if after is None else min(after, _LONGEST_WAIT_S))
        report.count(done)
        report.added += done.added
        report.changed += done.changed
        report.removed += done.removed

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


def _body(documents: Texts, sources: Sources) -> dict[str, Any]:
    """Return the body that tells of these documents."""
    return {"documents": documents, "sources": {id: sources[id] for id in documents if id in sources}}


def _parts(texts: Texts, sources: Sources) -> Iterator[Texts]:
    """Yield documents few enough for one request each, with the text again that the first of a source is
    prefilled behind."""
    part: dict[str, Iterable[str]] = {}
    last: dict[str, str] = {}  # by source
    left = _AT_ONCE
    for id in texts:
        source = sources.get(id)
        if part and _size(id, texts) > left:
            yield part
            part, left = {}, _AT_ONCE
        before = id if source is None else last.get(source, id)
        for one in (before, id):
            if one not in part:
                part[one] = texts[one]
                left -= _size(one, texts)
        if source is not None:
            last[source] = id
    yield part


def _size(id: str, texts: Texts) -> int:
    return sum(map(len, (id, *texts[id])))


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
