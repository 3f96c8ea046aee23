"""Milvus, Zilliz."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from blendrag.vectorstores.interface import PAGE, STORES, TIMEOUT_S, Address, Fields, VectorStore, client_of

_VECTORS = 100  # the types of fields from here on


@STORES.register("milvus")
class Milvus(VectorStore):
    """A collection of Milvus: rows in the order of their primary keys, as they were at the first page."""

    package, port, most_folders = "pymilvus", 19530, 1

    @classmethod
    def connect(cls, at: Address) -> Milvus:
        made = client_of("pymilvus", cls.package).MilvusClient
        token = ":".join(filter(None, (at.user, at.key)))
        return cls(made(at.url, token=token, db_name="/".join(at.folders), timeout=TIMEOUT_S), at.collection)

    def pages(self) -> Iterator[list[tuple[str, Fields]]]:
        about = self.client.describe_collection(self.collection)
        fields = [one["name"] for one in about["fields"] if int(one["type"]) < _VECTORS]
        key = next(one["name"] for one in about["fields"] if one.get("is_primary"))
        if about.get("enable_dynamic_field"):
            fields.append("$meta")  # all that are in no schema
        with closing(self.client.query_iterator(self.collection, PAGE, output_fields=fields)) as rows:
            while page := rows.next():
                yield [(str(row[key]), row) for row in page]

    def count(self) -> int:
        return int(self.client.get_collection_stats(self.collection)["row_count"])

    def names(self) -> list[str]:
        return list(self.client.list_collections())
