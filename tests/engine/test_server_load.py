"""An hour's mixed load in ten minutes: a server keeps no memory, file or thread of what is over."""

from __future__ import annotations

import itertools
import json
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from blendrag.cli.app import app
from blendrag.models import DEFAULT_MODEL
from served import COMPLETIONS, FILLER, TEXTS, Server
from waiting import until

pytestmark = [pytest.mark.own_engine, pytest.mark.nightly(part="large"), pytest.mark.timeout(1800)]

LASTS_S = 600
LOOKS_S = 5
CLIENTS = 4


@pytest.fixture
def server(model_dir: Path, tmp_path: Path) -> Iterator[Server]:
    running = Server(tmp_path / "kv", "--api-server-count", "2").wait()
    running.put(TEXTS)
    yield running
    if running.process.poll() is None:
        running.end()


class Load:
    """Clients that do one thing after another until they are told to end."""

    def __init__(self, server: Server) -> None:
        self.server, self.ended = server, threading.Event()
        self.done, self.wrong = Counter[str](), list[str]()
        self._numbers = itertools.count()
        self._threads = [threading.Thread(target=self._client, args=(seed,)) for seed in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self.ended.set()
        for thread in self._threads:
            thread.join()

    def _client(self, seed: int) -> None:
        chance = random.Random(seed)
        actions = [self._blend, self._plain, self._ingest, self._cancelled, self._stats]
        while not self.ended.is_set():
            action: Callable[[httpx.Client, int], httpx.Response | None] = chance.choice(actions)
            try:
                with self.server.connect() as client:  # a new one each time, as many users have
                    answer = action(client, next(self._numbers))
                if answer is not None and answer.status_code != 200:
                    self.wrong.append(answer.text)
            except httpx.TransportError as error:
                if not self.ended.is_set():
                    self.wrong.append(repr(error))
            self.done[action.__name__] += 1

    def _blend(self, client: httpx.Client, number: int) -> httpx.Response:
        answer = self.server.ask(f"What of Alpha{number % 4}? ({number})", client)
        if answer.status_code == 200 and answer.json()["blendrag"]["plain"]:
            self.wrong.append(answer.text)
        return answer

    def _plain(self, client: httpx.Client, number: int) -> httpx.Response:
        body = {"model": DEFAULT_MODEL, "prompt": f"Of {number}, it is said that", "max_tokens": 8}
        return client.post(COMPLETIONS, json=body)

    def _ingest(self, client: httpx.Client, number: int) -> httpx.Response:
        name = f"/v1/kb/collections/load-{number}"
        text = f"The village of Gamma{number} has {number} houses. {FILLER}"
        told = client.put(name, json={"documents": {"one": text}})
        if "report" not in json.loads(told.text.splitlines()[-1]):
            self.wrong.append(told.text)
        prompt = f"{text.strip()}\n\nGamma{number} has"
        body = {"model": DEFAULT_MODEL, "prompt": prompt, "max_tokens": 2}
        client.post(COMPLETIONS, json=body)
        return client.delete(name)

    def _cancelled(self, client: httpx.Client, number: int) -> None:
        content = "\n\n".join([*TEXTS.values(), f"Cancelled {number}"])
        body = {"model": DEFAULT_MODEL, "prompt": content, "max_tokens": 500, "stream": True}
        with client.stream("POST", COMPLETIONS, json=body) as answer:
            for _ in zip(range(number % 4), answer.iter_lines(), strict=False):
                pass

    def _stats(self, client: httpx.Client, number: int) -> httpx.Response:
        client.get("/metrics").raise_for_status()
        return client.get("/v1/kb/stats")


def size(server: Server) -> dict[str, int]:
    """Of all of its processes: memory of their own in MiB, files, threads."""
    found = Counter[str]()
    for process in server.family():
        try:
            found["memory"] += process.memory_full_info().uss >> 20
            found["files"] += process.num_fds()
            found["threads"] += process.num_threads()
        except psutil.NoSuchProcess:
            continue
    return dict(found)


def test_server_does_not_grow_with_what_it_has_done(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    load, sizes, ends = Load(server), list[dict[str, int]](), time.monotonic() + LASTS_S
    while time.monotonic() < ends:
        time.sleep(LOOKS_S)
        sizes.append(size(server))
    load.end()
    third = len(sizes) // 3
    before, after = (
        {name: median(one[name] for one in part) for name in sizes[0]}
        for part in (sizes[third : 2 * third], sizes[2 * third :])
    )
    with capsys.disabled():
        print(f"\n{dict(load.done)}\nfirst {sizes[0]}\nmiddle third {before}\nlast third {after}")
    assert not load.wrong, load.wrong[:3]
    assert after["memory"] < 1.03 * before["memory"]
    assert after["files"] <= before["files"] + CLIENTS
    assert after["threads"] <= before["threads"] + CLIENTS
    chunks = server.chunks()
    assert (chunks["chunks"], chunks["pending"]) == (len(TEXTS), 0)


def test_server_killed_while_it_ingests_begins_again_with_a_sound_store(server: Server) -> None:
    texts = {f"{n}": f"The village of Delta{n} has {n} houses. {FILLER}" for n in range(40)}

    def put() -> None:
        with server.connect() as client, pytest.raises(httpx.TransportError):
            client.put("/v1/kb/collections/killed", json={"documents": texts}).raise_for_status()

    telling = threading.Thread(target=put)
    telling.start()
    until(lambda: server.chunks()["ready"] >= len(TEXTS) + 5, 300, every_s=0.2)
    assert server.end(signal.SIGKILL) == []
    telling.join()
    again = Server(server.folder).wait()
    until(lambda: not again.chunks()["pending"], 300, every_s=1)
    chunks = again.chunks()
    assert (chunks["ready"], chunks["pending"]) == (len(TEXTS) + len(texts), 0)
    prompt = "\n\n".join([texts["39"].strip(), "Delta39 has"])
    body = {"model": DEFAULT_MODEL, "prompt": prompt, "max_tokens": 4}
    assert again.client.post(COMPLETIONS, json=body).json()["blendrag"]["reused"] > 0
    assert again.end() == []
    verified = CliRunner().invoke(app, ["verify", "--index", str(server.folder)])
    assert verified.exit_code == 0, verified.output
