"""Real servers for the tests of remote tiers, and records to keep there."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import redis
import torch

import stores
from blendrag.store.record import Layout, Record
from blendrag.store.stack import TierSpec
from blendrag.store.tiers.interface import Opened, Read, Tier, TierError
from blendrag.store.tiers.object import ObjectTier
from blendrag.store.tiers.redis import RedisTier
from blendrag.store.tiers.remote import RemoteTier
from places import free_port

KINDS = ["redis", "object"]
Kind = Literal["redis", "object"]
WAIT = 1.5  # seconds: timeout of the tiers here
REST = 0.5  # seconds: their cooldown
IDENTITY = replace(stores.IDENTITY, num_layers=6)
LAYOUT = Layout(IDENTITY, "bfloat16")
OTHER = Layout(replace(IDENTITY, weights="weights-2"), "bfloat16")
BUCKET = "bucket"
S3_OPTIONS = {
    "access_key_id": "somebody",
    "secret_access_key": "s3cr3t-of-s3",
    "region": "us-east-1",
    "allow_http": True,
}


def make_record(seed: int, tokens: int = 16, layout: Layout = LAYOUT) -> Record:
    """A record of its own tokens and random KV; the same one for the same arguments."""
    return stores.make_record(stores.make_chunk(seed, tokens, layout.dtype, layout.identity), layout)


def opened_of(tier: Tier, record: Record) -> Opened:
    """The record, as a tier has it."""
    found = tier.open([record.key])[record.key]
    assert isinstance(found, Opened), found
    return found


def rows_of(tier: Tier, opened: Opened, group: int | None = None) -> torch.Tensor:
    """All rows, read in groups of layers as the loader does, and verified."""
    head, step = opened.head, group or tier.group
    rows = torch.empty(head.layout.num_layers, head.row_bytes, dtype=torch.uint8)
    for first in range(0, len(rows), step):
        into = rows[first : first + step]
        (read,) = tier.read([Read(opened, first, first + len(into), into)])
        head.verify(first, read)
    return rows


def whole(tier: Tier, key: str) -> bool:
    """Whether a record is there, and all of it."""
    opened = tier.open([key]).get(key)
    if isinstance(opened, Exception):
        raise opened
    return opened is not None and len(rows_of(tier, opened)) == LAYOUT.num_layers


def seconds(call: Callable[[], object]) -> float:
    """How long a call took that failed as a tier's calls do."""
    start = time.perf_counter()
    with pytest.raises(TierError):
        call()
    return time.perf_counter() - start


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
        for _ in range(6000):
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
    """A real Redis (or Valkey), that keeps nothing when it is killed. Skips the test where there is none."""
    if (binary := shutil.which("valkey-server") or shutil.which("redis-server")) is None:
        pytest.skip("no redis-server here: apt-get install redis-server")
    keep = ["--save", "", "--appendonly", "no", "--dir", str(folder), "--loglevel", "warning"]
    return Process(lambda port: [binary, "--bind", "127.0.0.1", "--port", str(port), *keep, *options])


def s3_server(folder: Path) -> Process:
    """An S3 server over HTTP, whose objects are the files in ``folder / BUCKET``."""
    (folder / BUCKET).mkdir(parents=True, exist_ok=True)
    script = Path(__file__).with_name("s3_server.py")
    return Process(lambda port: [sys.executable, str(script), str(folder), str(port)])


@contextmanager
def running(server: Process) -> Iterator[Process]:
    server.start()
    try:
        yield server
    finally:
        server.kill()


@dataclass
class Served:
    """A server of either kind, as a tier sees it and behind the tier's back."""

    kind: Kind
    server: Process
    folder: Path  # of the S3 server's buckets

    def tier(self, port: int | None = None, layout: Layout = LAYOUT, **settings: Any) -> RemoteTier:
        return tier_at(self.kind, port or self.server.port, layout, **settings)

    def keep(self, key: str, data: bytes, layout: Layout = LAYOUT) -> None:
        if self.kind == "redis":
            with redis.Redis(port=self.server.port) as client:
                client.set(f"blendrag:{layout.digest}:{key}", data)
        else:
            self._file(key, layout).parent.mkdir(parents=True, exist_ok=True)
            self._file(key, layout).write_bytes(data)

    def kept(self, key: str, layout: Layout = LAYOUT) -> bytes | None:
        if self.kind == "redis":
            with redis.Redis(port=self.server.port) as client:
                return client.get(f"blendrag:{layout.digest}:{key}")  # type: ignore[return-value]
        file = self._file(key, layout)
        return file.read_bytes() if file.exists() else None

    def _file(self, key: str, layout: Layout) -> Path:
        return self.folder / BUCKET / "kv" / layout.digest / key[:2] / f"{key}.safetensors"


def tier_at(kind: str, port: int, layout: Layout = LAYOUT, **settings: Any) -> RemoteTier:
    """A tier for what listens on ``port``. Impatient, as tests are."""
    settings = {"timeout_s": WAIT, "cooldown_s": REST, **settings}
    if kind == "redis":
        return RedisTier(TierSpec(kind="redis", url=f"redis://127.0.0.1:{port}", **settings), layout)
    options = {**S3_OPTIONS, "endpoint": f"http://127.0.0.1:{port}"}
    spec = TierSpec(kind="object", url=f"s3://{BUCKET}/kv", options=options, **settings)
    return ObjectTier(spec, layout)


@contextmanager
def serving(kind: Kind, folder: Path) -> Iterator[Served]:
    with running(redis_server(folder) if kind == "redis" else s3_server(folder)) as server:
        yield Served(kind, server, folder)


@contextmanager
def answering(answer: Callable[[bytes], Iterable[bytes]]) -> Iterator[int]:
    """The port of a server that sends ``answer(what it received)``, and hangs up if that is nothing."""
    listener = socket.create_server(("127.0.0.1", 0))

    def talk(client: socket.socket) -> None:
        with client, suppress(OSError):
            while request := client.recv(1 << 16):
                sent = 0
                for part in answer(request):
                    client.sendall(part)
                    sent += len(part)
                if not sent:
                    return

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


A, B = make_record(1), make_record(2)
LONG = make_record(3, tokens=6000)  # its head takes more than one read
