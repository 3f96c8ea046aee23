"""A server of Chroma's."""

from __future__ import annotations

import contextlib
from base64 import b64encode
from collections.abc import Iterator

from blendrag.vectorstores.interface import PAGE, STORES, TIMEOUT_S, Address, Fields, VectorStore, client_of


@STORES.register("chroma")
class Chroma(VectorStore):
    """A collection of Chroma's. Its pages go by place, which deletions shift: so all ids are asked for at
    first."""

    package, port, options = "chromadb-client", 8000, ("tenant", "database")

    @classmethod
    def connect(cls, at: Address) -> Chroma:
        headers = {}
        if at.user is not None:
            headers["Authorization"] = "Basic " + b64encode(f"{at.user}:{at.key or ''}".encode()).decode()
        elif at.key is not None:
            headers = {"Authorization": f"Bearer {at.key}", "X-Chroma-Token": at.key}
        made = client_of("chromadb", cls.package).HttpClient
        place = "/".join((at.url, *at.folders))  # which it quotes itself
        client = made(place, ssl=at.tls, headers=headers, **at.options)
        with contextlib.suppress(AttributeError):  # it would wait for ever
            client._server._session.timeout = TIMEOUT_S
        return cls(client, at.collection)

    def pages(self) -> Iterator[list[tuple[str, Fields]]]:
        collection = self.client.get_collection(self.collection)
        ids = collection.get(include=[])["ids"]
        for begin in range(0, len(ids), PAGE):
            page = collection.get(ids[begin : begin + PAGE], include=["documents", "metadatas"])
            rows = zip(page["ids"], page["documents"], page["metadatas"], strict=True)
            yield [
                (id, {**(metadata or {}), **({} if text is None else {"page_content": text})})
                for id, text, metadata in rows
            ]

    def count(self) -> int:
        return int(self.client.get_collection(self.collection).count())

    def names(self) -> list[str]:
        return [one.name for one in self.client.list_collections()]
