"""LanceDB, in a folder."""

from __future__ import annotations

from collections.abc import Iterator

from blendrag.vectorstores.interface import PAGE, STORES, Address, Fields, VectorStore, client_of


@STORES.register("lancedb")
class Lance(VectorStore):
    """A table of LanceDB's: its rows in the version that it had at the first page."""

    package = "lancedb"

    @classmethod
    def connect(cls, at: Address) -> Lance:
        return cls(client_of("lancedb", cls.package).connect("/" + "/".join(at.folders)), at.collection)

    def pages(self) -> Iterator[list[tuple[str, Fields]]]:
        table = self.client.open_table(self.collection)
        columns = [one.name for one in table.schema if not str(one.type).startswith("fixed_size_list")]
        for batch in table.search().select(columns).to_batches(PAGE):
            yield [(str(row.get("id", row.get("_id"))), row) for row in batch.to_pylist()]

    def count(self) -> int:
        return int(self.client.open_table(self.collection).count_rows())

    def names(self) -> list[str]:
        return list(self.client.table_names())

    def close(self) -> None:
        """Leave the folder as it is."""
