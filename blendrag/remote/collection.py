"""The documents of one vector store, whose KV a server keeps."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
from collections.abc import Iterable
from typing import Any, TypeVar

import xxhash

from blendrag.errors import BlendragError, ConfigError, ServerError, StoreFullError
from blendrag.progress import Progress, progress_bar
from blendrag.remote.http import MissingError, Server
from blendrag.serving.collection import KeptDocuments, Sources, SyncReport, Texts
from blendrag.serving.owners import is_volatile
from blendrag.serving.prefill import PrefillReport

_NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)  # as the server takes it
_AT_ONCE = 256  # ids in one address
_ERRORS: dict[int, type[BlendragError]] = {400: ConfigError, 507: StoreFullError}

Report = TypeVar("Report", bound=PrefillReport)


class RemoteCollection(KeptDocuments):
    """A collection under ``/v1/kb/collections``. What a client does not wait for any more, the server goes on
    with."""

    def __init__(self, server: Server, name: str) -> None:
        self._server, self.name = server, name
        self._path = f"v1/kb/collections/{_as_path(name)}"

    def ids(self) -> set[str]:
        try:
            return set(self._server.call("GET", self._path)["ids"])
        except MissingError:  # as one without any
            return set()

    def add(
        self,
        documents: Texts,
        *,
        sources: Sources | None = None,
        progress: Progress | bool | None = False,
    ) -> PrefillReport:
        return self._put(PrefillReport, documents, sources, progress)

    def sync(
        self,
        documents: Texts,
        *,
        sources: Sources | None = None,
        progress: Progress | bool | None = False,
    ) -> SyncReport:
        return self._put(SyncReport, documents, sources, progress, sync=True)

    def remove(self, ids: Iterable[str]) -> None:
        ids = list(ids)
        for at in range(0, len(ids), _AT_ONCE):
            self._forget(params={"id": ids[at : at + _AT_ONCE]})

    def clear(self) -> None:
        self._forget()

    def _forget(self, **which: Any) -> None:
        with contextlib.suppress(MissingError):  # as one without any
            self._server.call("DELETE", self._path, **which)

    def _put(
        self,
        kind: type[Report],
        documents: Texts,
        sources: Sources | None,
        progress: Progress | bool | None,
        **more: Any,
    ) -> Report:
        texts = {id: [texts] if isinstance(texts, str) else list(texts) for id, texts in documents.items()}
        body = {"documents": texts, "sources": dict(sources or {}), **more}
        if is_volatile(self.name):
            _forget_at_exit(self._server, self.name, os.getpid())
        line: dict[str, Any] = {}
        with progress_bar(progress) as bar, self._server.answer("PUT", self._path, body) as response:
            done = total = 0
            for said in response.iter_lines():
                line = json.loads(said)
                if "doing" in line:
                    bar.note(line["doing"])
                    bar.total(line["total"] - total)
                    bar.advance(line["done"] - done)
                    done, total = line["done"], line["total"]
        if "error" in line:
            raise _ERRORS.get(line.get("status", 500), ServerError)(f"{self._server}: {line['error']}")
        if "report" not in line:
            raise ServerError(f"{self._server} broke off; it goes on with these documents: add them again")
        return kind(**line["report"])


@functools.cache
def _forget_at_exit(server: Server, name: str, process: int) -> None:
    """Have the server forget what ends with this process, unless that is killed."""

    def forget() -> None:
        if os.getpid() == process:  # and no fork of it
            with contextlib.suppress(BlendragError):
                RemoteCollection(server, name).clear()

    atexit.register(forget)


def _as_path(name: str) -> str:
    """Names are of any kind, such as paths; those of the server's collections are not."""
    if _NAME.fullmatch(name):
        return name
    readable = re.sub(r"[^\w.-]+", ".", name, flags=re.ASCII).strip(".")[-64:]
    return f"{readable}-{xxhash.xxh3_64_hexdigest(name.encode())}"
