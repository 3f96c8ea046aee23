"""Real servers for the tests of remote tiers, and records to keep there.

As a script, an S3 server: ``python servers.py FOLDER`` prints its port and serves buckets that are folders.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import torch

from blendrag.store.identity import KVIdentity
from blendrag.store.record import Layout, Record
from blendrag.store.tiers.interface import Opened, Read, Tier

LAYERS = 6
IDENTITY = KVIdentity("tiny", "weights-1", "bfloat16", num_layers=LAYERS, num_kv_heads=1, head_size=4)
LAYOUT = Layout(IDENTITY, "bfloat16")
OTHER = Layout(KVIdentity("tiny", "weights-2", "bfloat16", LAYERS, 1, 4), "bfloat16")
BUCKET = "bucket"
S3_OPTIONS = {
    "access_key_id": "somebody",
    "secret_access_key": "s3cr3t-of-s3",
    "region": "us-east-1",
    "allow_http": True,
}


def make_record(seed: int, tokens: int = 16, layout: Layout = LAYOUT) -> Record:
    """A record of its own tokens and random KV; the same one for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    ids = (seed, *torch.randint(0, 50_000, (tokens - 1,), generator=generator).tolist())
    shape = (layout.num_layers, 2, tokens, layout.heads, layout.size)
    kv = torch.randn(shape, generator=generator).to(layout.dtype)
    return layout.encode(layout.identity.chunk_key(ids), ids, kv)


def raw(record: Record) -> bytes:
    """The bytes that every tier keeps of a record."""
    return record.head.bytes() + record.rows.numpy().tobytes()


def rows_of(tier: Tier, opened: Opened, group: int | None = None) -> torch.Tensor:
    """All rows, read in groups of layers as the loader does, and verified."""
    head, step = opened.head, group or tier.group
    rows = torch.empty(head.layout.num_layers, head.row_bytes, dtype=torch.uint8)
    for first in range(0, len(rows), step):
        into = rows[first : first + step]
        (read,) = tier.read([Read(opened, first, first + len(into), into)])
        head.verify(first, read)
    return rows


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Process:
    """A server in a process of its own on a port of its own, which can be killed and started again there."""

    def __init__(self, command: Callable[[int], list[str]]) -> None:
        self.port = free_port()
        self._command = command(self.port)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        for _ in range(1000):
            with suppress(OSError), socket.create_connection(self.address, timeout=1):
                return
            assert self._process.poll() is None, "the server ended"
            time.sleep(0.01)
        raise AssertionError("the server does not answer")

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


def redis_server(folder: Path, *options: str) -> Process:
    """A real Redis (or Valkey), that keeps nothing when it is killed. Needs ``redis_binary``."""
    binary = redis_binary()
    assert binary is not None
    keep = ["--save", "", "--appendonly", "no", "--dir", str(folder), "--loglevel", "warning"]
    return Process(lambda port: [binary, "--bind", "127.0.0.1", "--port", str(port), *keep, *options])


def redis_binary() -> str | None:
    return shutil.which("valkey-server") or shutil.which("redis-server")


def s3_server(folder: Path) -> Process:
    """An S3 server over HTTP, whose objects are the files in ``folder / BUCKET``."""
    (folder / BUCKET).mkdir(parents=True, exist_ok=True)
    return Process(lambda port: [sys.executable, __file__, str(folder), str(port)])


@contextmanager
def running(server: Process) -> Iterator[Process]:
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def answering(answer: Callable[[bytes], bytes]) -> Iterator[int]:
    """The port of a server that says ``answer(what it received)``, or hangs up if that is nothing."""
    listener = socket.create_server(("127.0.0.1", 0))

    def talk(client: socket.socket) -> None:
        with client, suppress(OSError):
            while (request := client.recv(1 << 16)) and (reply := answer(request)):
                client.sendall(reply)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=talk, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


class S3Handler(BaseHTTPRequestHandler):
    """The part of S3 that object tiers use: PUT, ranged and conditional GET, HEAD, DELETE, DeleteObjects."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    folder = Path()

    def do_GET(self) -> None:
        try:
            file = self._file().open("rb")
        except OSError:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        with file:
            status = os.fstat(file.fileno())
            etag = f'"{status.st_mtime_ns:x}-{status.st_ino:x}"'
            if self.headers.get("If-Match", etag) != etag:
                self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
                return
            begin, end, size = 0, status.st_size, status.st_size
            if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                begin, end = int(wanted[1]), min(int(wanted[2]) + 1, size)
                if begin >= size:
                    self._answer(416, b"<Error><Code>InvalidRange</Code></Error>")
                    return
            self.send_response(206 if wanted else 200)
            if wanted:
                self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
            self.send_header("Content-Length", str(end - begin))
            self.send_header("ETag", etag)
            self.send_header("Last-Modified", self.date_time_string(status.st_mtime))
            self.end_headers()
            if self.command == "GET" and end > begin:
                self.connection.sendfile(file, begin, end - begin)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        path = self._file()
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{threading.get_ident()}.tmp")
        left = int(self.headers["Content-Length"])
        with temporary.open("wb") as file:
            while left:
                data = self.rfile.read(min(left, 1 << 20))
                if not data:
                    temporary.unlink()
                    return
                file.write(data)
                left -= len(data)
        temporary.replace(path)
        self._answer(200, headers={"ETag": '"new"'})

    def do_DELETE(self) -> None:
        self._file().unlink(missing_ok=True)
        self._answer(204)

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        keys = re.findall(r"<Key>(.*?)</Key>", asked)
        for key in keys:
            (self._file() / key).unlink(missing_ok=True)
        deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    def _file(self) -> Path:
        return self.folder / unquote(urlsplit(self.path).path).lstrip("/")

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    S3Handler.folder = Path(sys.argv[1])
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), S3Handler).serve_forever()
