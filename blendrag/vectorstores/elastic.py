"""Elasticsearch and OpenSearch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

from blendrag.errors import SourceError
from blendrag.vectorstores.interface import PAGE, STORES, TIMEOUT_S, Address, Fields, VectorStore, client_of

_KEPT = "1h"  # a scroll, between two of its pages
_VECTORS = ("vector", "vector_field", "embedding", "*_vec")  # fields that nobody reads here


class _Indexed(VectorStore):
    port: ClassVar[int | None] = 9200

    def pages(self) -> Iterator[list[tuple[str, Fields]]]:
        body: dict[str, Any] = {"sort": ["_doc"], "_source": {"excludes": list(_VECTORS)}}
        page = self.client.search(index=self.collection, scroll=_KEPT, size=PAGE, body=body)
        try:
            while True:
                if page["timed_out"] or page["_shards"]["failed"]:
                    raise SourceError(f"{self}: some shards did not answer")
                if not page["hits"]["hits"]:
                    break
                yield [(hit["_id"], hit["_source"]) for hit in page["hits"]["hits"]]
                page = self.client.scroll(body={"scroll_id": page["_scroll_id"], "scroll": _KEPT})
        finally:
            with contextlib.suppress(Exception):  # it ends by itself
                self.client.clear_scroll(body={"scroll_id": [page["_scroll_id"]]})

    def count(self) -> int:
        return int(self.client.count(index=self.collection)["count"])

    def names(self) -> list[str]:
        found = self.client.indices.get_alias(index="*")
        return [name for index, about in found.items() for name in (index, *about["aliases"])]


@STORES.register("elasticsearch")
class Elasticsearch(_Indexed):
    """An index of Elasticsearch's, as it was at the first page."""

    package = "elasticsearch"

    @classmethod
    def connect(cls, at: Address) -> Elasticsearch:
        made = client_of("elasticsearch", cls.package).Elasticsearch
        access: dict[str, Any] = {"api_key": at.key} if at.key else {}
        if at.user is not None:
            access = {"basic_auth": (at.user, at.key or "")}
        return cls(made(at.url + at.prefix, request_timeout=TIMEOUT_S, **access), at.collection)


@STORES.register("opensearch")
class OpenSearch(_Indexed):
    """An index of OpenSearch's, as it was at the first page."""

    package = "opensearch-py"

    @classmethod
    def connect(cls, at: Address) -> OpenSearch:
        made = client_of("opensearchpy", cls.package).OpenSearch
        access: dict[str, Any] = {"headers": {"Authorization": f"Bearer {at.key}"}} if at.key else {}
        if at.user is not None:
            access = {"http_auth": (at.user, at.key or "")}
        return cls(made(at.url + at.prefix, timeout=TIMEOUT_S, **access), at.collection)
