"""Weaviate."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from blendrag.vectorstores.interface import PAGE, STORES, Address, Fields, VectorStore, client_of


@STORES.register("weaviate")
class Weaviate(VectorStore):
    """A collection of Weaviate's, of one tenant where it has several: objects in the order of their ids."""

    package, port, options = "weaviate-client", 8080, ("grpc_host", "grpc_port", "tenant")
    most_folders = 0

    def __init__(self, client: Any, collection: str, tenant: str | None = None) -> None:
        super().__init__(client, collection)
        self.tenant = tenant

    @classmethod
    def connect(cls, at: Address) -> Weaviate:
        module = client_of("weaviate", cls.package)
        client = module.connect_to_custom(
            http_host=at.host,
            http_port=at.port,
            http_secure=at.tls,
            grpc_host=at.options.get("grpc_host", at.host),
            grpc_port=int(at.options.get("grpc_port", 50051)),
            grpc_secure=at.tls,
            auth_credentials=module.auth.AuthApiKey(at.key) if at.key else None,
        )
        return cls(client, at.collection, at.options.get("tenant"))

    @property
    def _objects(self) -> Any:
        found = self.client.collections.get(self.collection)
        return found.with_tenant(self.tenant) if self.tenant else found

    def pages(self) -> Iterator[list[tuple[str, Fields]]]:
        objects = self._objects.iterator(cache_size=PAGE)
        while page := list(islice(objects, PAGE)):
            yield [(str(one.uuid), one.properties) for one in page]

    def count(self) -> int:
        return int(self._objects.aggregate.over_all(total_count=True).total_count)

    def names(self) -> list[str]:
        return list(self.client.collections.list_all())
