"""PostgreSQL, with pgvector or whatever else has the vectors there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

from blendrag.errors import ConfigError
from blendrag.vectorstores.interface import PAGE, STORES, TIMEOUT_S, Address, Fields, VectorStore, client_of

_TEXTS = ("text", "character varying", "json", "jsonb")  # types of columns that are read
# Where LangChain's PGVector keeps all collections.
_EMBEDDINGS, _COLLECTIONS = "langchain_pg_embedding", "langchain_pg_collection"


@STORES.register("pgvector")
@STORES.register("postgres")
@STORES.register("postgresql")
class Postgres(VectorStore):
    """A table, or a collection of LangChain's PGVector: rows in the order of the primary key, a query a page.

    client: a connection of psycopg's, with autocommit.
    """

    package, port, options = "psycopg[binary]", 5432, ("host", "sslmode", "sslrootcert")
    most_folders = 1

    @classmethod
    def connect(cls, at: Address) -> Postgres:
        client = client_of("psycopg", cls.package).connect(
            **{"host": at.host, **at.options},  # a folder, for a Unix socket
            port=at.port,
            dbname="/".join(at.folders) or None,
            user=at.user,
            password=at.key,
            connect_timeout=10,
            autocommit=True,
            options=f"-c statement_timeout={TIMEOUT_S}s",
        )
        return cls(client, at.collection)

    def pages(self) -> Iterator[list[tuple[str, Fields]]]:
        table, which, given = self._table()
        key, columns = self._key(table), self._columns(table)
        first, *others = (_in_query(_quoted(name)) for name in (key, *columns))
        query = f"SELECT {', '.join([first, *others])} FROM {_in_query(table)} WHERE {which}"
        order = f"ORDER BY {first} LIMIT {PAGE}"
        rows = self._rows(f"{query} {order}", given)
        while rows:
            yield [(str(row[0]), dict(zip(columns, row[1:], strict=True))) for row in rows]
            rows = self._rows(f"{query} AND {first} > %s {order}", [*given, rows[-1][0]])

    def count(self) -> int:
        table, which, given = self._table()
        return int(self._rows(f"SELECT count(*) FROM {_in_query(table)} WHERE {which}", given)[0][0])

    def names(self) -> list[str]:
        tables = "SELECT relname FROM pg_class WHERE relkind IN ('r', 'p') AND pg_table_is_visible(oid)"
        return [str(name) for (name,) in self._rows(tables)] + self._collections()

    def _collections(self) -> list[str]:
        if self._rows("SELECT to_regclass(%s)", [_COLLECTIONS]) == [(None,)]:
            return []
        return [str(name) for (name,) in self._rows(f"SELECT name FROM {_COLLECTIONS}")]

    def _table(self) -> tuple[str, str, list[Any]]:
        """Return where the rows are: a table, a condition, and its values."""
        if self.collection in self._collections():
            which = f"collection_id IN (SELECT uuid FROM {_COLLECTIONS} WHERE name = %s)"
            return _EMBEDDINGS, which, [self.collection]
        return ".".join(map(_quoted, self.collection.split("."))), "true", []

    def _key(self, table: str) -> str:
        keys = self._rows(
            "SELECT a.attname FROM pg_index i JOIN pg_attribute a"
            " ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)"
            " WHERE i.indrelid = %s::regclass AND i.indisprimary",
            [table],
        )
        if len(keys) != 1:
            raise ConfigError(f"the table {self.collection!r} has no primary key of one column to go by")
        return str(keys[0][0])

    def _columns(self, table: str) -> list[str]:
        found = self._rows(
            "SELECT a.attname FROM pg_attribute a WHERE a.attrelid = %s::regclass AND a.attnum > 0"
            " AND NOT a.attisdropped AND split_part(format_type(a.atttypid, NULL), '(', 1) = ANY (%s)",
            [table, list(_TEXTS)],
        )
        return [str(name) for (name,) in found]

    def _rows(self, query: str, given: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with closing(self.client.cursor()) as cursor:
            cursor.execute(query, given)
            return [tuple(row) for row in cursor.fetchall()]


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _in_query(name: str) -> str:
    """Return a name as a query with placeholders has it."""
    return name.replace("%", "%%")
