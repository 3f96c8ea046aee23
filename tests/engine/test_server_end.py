"""The end of a server under load, and of one whose engine has died. Two servers on one folder."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from blendrag.models import DEFAULT_MODEL
from served import COMPLETIONS, FILLER, TEXTS, Server, ended

pytestmark = [pytest.mark.own_engine, pytest.mark.nightly]

STREAMS = 20
DOCUMENTS = {f"{n}": f"The village of Delta{n} has {n} houses. {FILLER}" for n in range(120)}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(STREAMS + 2) as threads:
        yield threads


def told(server: Server, name: str, **more: Any) -> dict[str, Any]:
    """The last line of an answer to documents."""
    with server.connect() as client:
        path = f"/v1/kb/collections/{name}"
        answer = client.put(path, json={"documents": DOCUMENTS, **more})
        line: dict[str, Any] = json.loads(answer.text.splitlines()[-1])
        return line


def streamed(server: Server, n: int) -> list[str]:
    body = {"model": DEFAULT_MODEL, "prompt": f"{n} times upon a time", "stream": True, "ignore_eos": True}
    body["max_tokens"] = 1900 if n % 2 else 40
    with server.connect() as client, client.stream("POST", COMPLETIONS, json=body) as answer:
        assert answer.status_code == 200
        return [line for line in answer.iter_lines() if line]


def left_of(family: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in psutil.wait_procs(family, timeout=10)[1] if not ended(process)]


def begun(server: Server, *work: Future[Any]) -> None:
    """Once documents are being prefilled."""
    while server.chunks()["ready"] < len(TEXTS) + 2:
        assert not any(one.done() for one in work)
        time.sleep(0.2)


def test_server_that_is_told_to_end_ends_in_order_and_the_next_goes_on(
    model_dir: Path, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    server = Server(tmp_path / "kv").wait()
    server.put(TEXTS)
    puts = [pool.submit(told, server, "long"), pool.submit(told, server, "whole", sync=True)]
    begun(server, *puts)
    streams = [pool.submit(streamed, server, n) for n in range(STREAMS)]
    time.sleep(3)
    family, at = server.family(), time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert server.client.get("/v1/models").status_code == 503
    server.process.wait(60)
    assert left_of(family) == []
    assert time.monotonic() - at < 45  # 30, and the machine may be busy
    assert {line["status"] for line in [one.result() for one in puts]} == {503}
    for one in streams:
        *_, last, end = one.result()
        assert end == "data: [DONE]"
        assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] in ("length", "abort")

    again = Server(server.folder).wait()
    chunks = again.chunks()
    assert chunks["ready"] + chunks["pending"] == chunks["chunks"] > len(TEXTS)
    put = pool.submit(told, again, "long")
    begun(again)
    family, at = again.family(), time.monotonic()
    (worker,) = (process for process in family if "Worker" in process.name())
    worker.kill()
    with contextlib.suppress(httpx.TransportError):
        assert "error" in put.result()
    again.process.wait(60)
    assert left_of(family) == []
    assert time.monotonic() - at < 30  # ten, and the machine may be busy
