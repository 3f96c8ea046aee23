"""Qdrant."""

from __future__ import annotations

from collections.abc import Iterator

from blendrag.vectorstores.interface import PAGE, STORES, TIMEOUT_S, Address, Fields, VectorStore, client_of


@STORES.register("qdrant")
class Qdrant(VectorStore):
    """A collection of Qdrant's: points in the order of their ids."""

    package, port = "qdrant-client", 6333

    @classmethod
    def connect(cls, at: Address) -> Qdrant:
        made = client_of("qdrant_client", cls.package).QdrantClient
        client = made(
            url=at.url, prefix=at.prefix, api_key=at.key, timeout=TIMEOUT_S, check_compatibility=False
        )
        return cls(client, at.collection)

    def pages(self) -> Iterator[list[tuple[str, Fields]]]:
        after = None
        while True:
            points, after = self.client.scroll(self.collection, limit=PAGE, offset=after, with_payload=True)
            yield [(str(point.id), point.payload or {}) for point in points]
            if after is None:
                break

    def count(self) -> int:
        return int(self.client.count(self.collection, exact=False).count)

    def names(self) -> list[str]:
        collections = [one.name for one in self.client.get_collections().collections]
        return collections + [one.alias_name for one in self.client.get_aliases().aliases]
