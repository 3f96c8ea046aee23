"""LanceDB, in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blendrag.errors import ConfigError
from blendrag.vectorstores.interface import PAGE, STORES, Address, Fields, VectorStore, client_of


@STORES.register("lancedb")
class Lance(VectorStore):
    """A table of LanceDB's: its rows in the version that it had at the first page."""

    package = "lancedb"

    def __init__(self, client: Any, collection: str, id_field: str = "id") -> None:
        super().__init__(client, collection)
        self.id_field = id_field

    @classmethod
    def connect(cls, at: Address) -> Lance:
        connect, folder = client_of("lancedb", cls.package).connect, Path("/", *at.folders)
        if not folder.is_dir():  # it would be made
            raise ConfigError(f"{at}: there is no folder {str(folder)!r}")
        return cls(connect(folder), at.collection)

    def pages(self) -> Iterator[list[tuple[str, Fields]]]:
        table = self.client.open_table(self.collection)
        columns = [one.name for one in table.schema if not str(one.type).startswith("fixed_size_list")]
        for batch in table.search().select(columns).to_batches(PAGE):
            yield [(str(row[self.id_field]), row) for row in batch.to_pylist()]

    def count(self) -> int:
        return int(self.client.open_table(self.collection).count_rows())

    def names(self) -> list[str]:
        return list(self.client.list_tables().tables)

    def close(self) -> None:
        """Leave the folder as it is."""
