"""The end of a server as vLLM's launcher has it, over a stand-in for its engine. Each server is a process of
its own, forked from one that has imported what it needs."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from places import ROOT, free_port

pytestmark = pytest.mark.xdist_group("end")  # one process that imports vLLM

ALLOWED_S = 6

SERVER = """
import asyncio, os, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from vllm.entrypoints.launchers.launcher import create_server_socket, serve_http
from blendrag.errors import EngineClosedError
from blendrag.server import LIMITS
from blendrag.server.front_end import _Engine
from blendrag.server.gate import Gate, Requests
from blendrag.settings import Settings

class LLM:
    errored, is_running, engine_core = False, True, None
    vllm_config = SimpleNamespace(shutdown_timeout=int(sys.argv[1]))
    output_processor = SimpleNamespace(request_states={"endless": None})
    aborted = asyncio.Event()

    async def abort(self, ids, internal):
        self.aborted.set()

    async def collective_rpc(self, *_, **__):
        await asyncio.sleep(600)

    def shutdown(self, timeout=None):
        pass

async def main(port):
    app, llm, requests = FastAPI(), LLM(), Requests()
    app.add_middleware(Gate, keys=None, limits=LIMITS, requests=requests)
    app.state.engine_client = llm
    engine = _Engine(Settings.load(), llm, asyncio.get_running_loop(), alone=True)
    engine.end_in_order({}, requests, app.state)
    pool = ThreadPoolExecutor()

    async def short():
        for _ in range(20):
            yield "data"
            await asyncio.sleep(0.1)
        yield " the end"

    async def endless():
        while not llm.aborted.is_set():
            yield "data"
            await asyncio.sleep(0.1)
        yield " the end"

    async def unread():
        while True:
            yield "data" * 100_000
            await asyncio.sleep(0)

    @app.get("/stream/{name}")
    async def stream(name: str):
        return StreamingResponse({"short": short, "endless": endless, "unread": unread}[name]())

    @app.get("/calls")
    async def calls():
        try:
            await asyncio.get_running_loop().run_in_executor(pool, engine.call, "flush", "store")
        except EngineClosedError as error:
            return str(error)

    @app.get("/health")
    async def health():
        return None

    @app.get("/hangs")
    async def hangs():
        pool.submit(time.sleep, 600)

    sock = create_server_socket(("127.0.0.1", port), reuse_port=False)
    ended = await serve_http(app, sock, host="127.0.0.1", port=port, log_level="error")
    llm.shutdown(timeout=1)
    await ended

for port in map(int, sys.stdin):
    if not (server := os.fork()):
        asyncio.run(main(port))
        os._exit(0)
    print(server, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(server, 0)[1]), flush=True)
"""


class Server(psutil.Process):
    """One of the ``parent``'s."""

    def __init__(self, parent: subprocess.Popen[str]) -> None:
        assert parent.stdin is not None and parent.stdout is not None
        port = free_port()
        print(port, file=parent.stdin, flush=True)
        super().__init__(int(parent.stdout.readline()))
        self._said = parent.stdout
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)

    def ended(self) -> int:
        """Its exit code, when it has ended."""
        return int(self._said.readline())


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(ALLOWED_S)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(tmp_path_factory.mktemp("end") / "log").open("w"),
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
    )
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def server(parent: subprocess.Popen[str]) -> Iterator[Server]:
    made = Server(parent)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            made.client.get("/health")
            break
        except httpx.TransportError:
            time.sleep(0.05)
    yield made
    made.client.close()
    with contextlib.suppress(psutil.NoSuchProcess):
        made.kill()


def test_answers_end_and_new_requests_are_refused(server: Server) -> None:
    client = server.client
    with ThreadPoolExecutor(10) as pool:
        streams = [pool.submit(client.get, f"/stream/{name}") for name in ["short", "endless"] * 4]
        time.sleep(0.5)
        server.terminate()
        time.sleep(0.3)
        assert client.get("/health").status_code == 503
        assert server.is_running()
        for one in streams:
            assert one.result().text.endswith(" the end")
    assert server.ended() == 0


@pytest.mark.parametrize("what", ["unread", "calls", "hangs"])
def test_what_does_not_end_holds_up_no_server(server: Server, what: str) -> None:
    """A client that does not read, a call that waits for the engine, and a thread of its own."""
    client = server.client
    with ThreadPoolExecutor(1) as pool:
        if what == "unread":
            held = socket.create_connection((client.base_url.host, client.base_url.port or 0))
            held.sendall(b"GET /stream/unread HTTP/1.1\r\nHost: x\r\n\r\n")
        else:
            asked = pool.submit(client.get, f"/{what}")
        time.sleep(0.5)
        begun = time.monotonic()
        server.terminate()
        server.ended()
        assert time.monotonic() - begun < 4 * ALLOWED_S
        if what == "unread":
            held.close()
        else:
            assert asked.result().status_code == 200
