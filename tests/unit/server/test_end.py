"""The end of a server as vLLM's launcher has it, in a process of its own, over a stand-in for its engine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from places import ROOT

ALLOWED_S = 6

SERVER = """
import asyncio, sys, threading, time
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
    vllm_config = SimpleNamespace(shutdown_timeout=int(sys.argv[2]))
    output_processor = SimpleNamespace(request_states={"endless": None})
    aborted = asyncio.Event()

    async def abort(self, ids, internal):
        self.aborted.set()

    async def collective_rpc(self, *_, **__):
        await asyncio.sleep(600)

    def shutdown(self, timeout=None):
        print("the engine has ended", flush=True)

async def main():
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

    port = int(sys.argv[1])
    sock = create_server_socket(("127.0.0.1", port), reuse_port=False)
    ended = await serve_http(app, sock, host="127.0.0.1", port=port, log_level="error")
    llm.shutdown(timeout=1)
    await ended

asyncio.run(main())
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(port), str(ALLOWED_S)],
        stdout=(tmp_path / "log").open("w"),
        stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
    )
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and process.poll() is None:
            try:
                client.get("/health")
                break
            except httpx.TransportError:
                time.sleep(0.2)
        yield process, client
    process.kill()
    process.wait()


def test_answers_end_and_new_requests_are_refused(server: tuple[subprocess.Popen[str], httpx.Client]) -> None:
    process, client = server
    with ThreadPoolExecutor(10) as pool:
        streams = [pool.submit(client.get, f"/stream/{name}") for name in ["short", "endless"] * 4]
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert client.get("/health").status_code == 503
        assert process.poll() is None
        for one in streams:
            assert one.result().text.endswith(" the end")
    assert process.wait(60) == 0


@pytest.mark.parametrize("what", ["unread", "calls", "hangs"])
def test_what_does_not_end_holds_up_no_server(
    server: tuple[subprocess.Popen[str], httpx.Client], what: str
) -> None:
    """A client that does not read, a call that waits for the engine, and a thread of its own."""
    process, client = server
    with ThreadPoolExecutor(1) as pool:
        if what == "unread":
            held = socket.create_connection((client.base_url.host, client.base_url.port or 0))
            held.sendall(b"GET /stream/unread HTTP/1.1\r\nHost: x\r\n\r\n")
        else:
            asked = pool.submit(client.get, f"/{what}")
        time.sleep(0.5)
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        assert time.monotonic() - begun < 4 * ALLOWED_S
        if what == "unread":
            held.close()
        else:
            assert asked.result().status_code == 200
