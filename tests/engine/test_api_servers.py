"""Several API servers before one engine: what one is told, all know."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from blendrag.models import DEFAULT_MODEL
from served import COMPLETIONS, FILLER, KB, TEXTS, Server, events_of, text_of
from waiting import until

pytestmark = [pytest.mark.own_engine, pytest.mark.nightly(part="ranks")]

Two = tuple[httpx.Client, httpx.Client]


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("servers") / "kv", "--api-server-count", "2").wait()
    yield running
    if running.process.poll() is None:
        running.end()


def answering(server: Server, client: httpx.Client) -> int:
    """The process at the other end of the client's connection, which is kept."""
    with client.stream("GET", "/health") as response:
        response.read()
        stream = response.extensions["network_stream"]
        address = stream.get_extra_info("client_addr")
        for process in server.family():
            if any(one.raddr == address for one in process.net_connections("tcp4")):
                return process.pid
    raise AssertionError("nobody has this connection")


@pytest.fixture(scope="module")
def two(server: Server) -> Iterator[Two]:
    """Clients of one server each."""
    clients: dict[int, httpx.Client] = {}
    for _ in range(20):
        client = server.connect()
        clients.setdefault(answering(server, client), client)
        if len(clients) == 2:
            break
    one, other = clients.values()
    yield one, other


def reused(server: Server, client: httpx.Client, question: str) -> int:
    answer = server.ask(question, client)
    assert answer.json()["blendrag"]["plain"] is None, answer.text
    return answer.json()["blendrag"]["reused"]


def test_what_one_server_is_told_is_reused_by_another(server: Server, two: Two) -> None:
    one, other = two
    assert server.ask("Before?", other).json()["blendrag"]["plain"]  # it has looked: nothing is known yet
    assert server.put(TEXTS, one)["chunks"] == len(TEXTS)
    assert all(reused(server, client, f"When was Alpha{n} founded?") for n, client in enumerate(two))
    assert server.put(TEXTS, other)["chunks"] == 0
    assert other.get(KB).json()["ids"] == sorted(TEXTS)
    extra = {"extra": f"Gamma is a village of nine houses. {FILLER}"}
    server.put(extra, other)
    assert one.get("/v1/kb/stats").json()["chunks"]["ready"] == len(TEXTS) + 1
    assert other.delete(KB, params={"id": "extra"}).json() == {"removed": 1}
    assert one.get("/v1/kb/stats").json()["chunks"]["ready"] == len(TEXTS)
    body = {"model": DEFAULT_MODEL, "prompt": extra["extra"] + "\n\nGamma has", "max_tokens": 1}
    assert "cached tokens" in one.post(COMPLETIONS, json=body).json()["blendrag"]["plain"]


def test_answers_of_two_servers_get_their_own_evidence(server: Server, two: Two) -> None:
    def evidence(n: int) -> tuple[int, int]:
        client, ratio = two[n % 2], (n + 1) / 10
        more = {"blendrag": {"evidence": True, "recompute_ratio": ratio}, "stream": True}
        counts = events_of(server.ask(f"Question {n}?", client, **more))[-1]["blendrag"]
        return counts["recomputed"], counts["prefix"]

    server.put(TEXTS)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(evidence, range(8)))
    recomputed = [one for one, _ in found]
    assert recomputed == sorted(recomputed)
    assert len(set(recomputed)) == len(recomputed)


def test_two_servers_that_ingest_at_once_both_finish(server: Server, two: Two) -> None:
    def work(n: int) -> int:
        client = two[n % 2]
        name = f"/v1/kb/collections/at-once-{n}"
        texts = {f"{i}": f"Village {n}.{i} has {n + i} houses. {FILLER}" for i in range(3)}
        server.put(texts, client, name, sources=dict.fromkeys(texts, "all"))
        reused(server, client, f"Meanwhile {n}?")
        return client.delete(name).json()["removed"]

    server.put(TEXTS)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(6))) == [3] * 6
    chunks = server.chunks()
    assert (chunks["ready"], chunks["pending"]) == (len(TEXTS), 0)
    assert text_of(server.ask("The end?", two[0])) == text_of(server.ask("The end?", two[1]))


def test_two_syncs_at_once_end_as_one_of_the_two(server: Server, two: Two) -> None:
    """As in tests/unit/serving/test_prefill.py, which takes more rounds."""
    server.put(TEXTS)
    ids = sorted(TEXTS)

    path, wanted = "/v1/kb/collections/synced", [ids[:2], ids[2:]]

    def sync(client: httpx.Client, kept: list[str]) -> None:
        server.put({id: TEXTS[id] for id in kept}, client, path, sync=True)

    with ThreadPoolExecutor(2) as pool:
        for _ in range(20):
            list(pool.map(sync, two, wanted))
            assert two[0].get(path).json()["ids"] in wanted
    assert two[1].delete(path).json() == {"removed": 2}


def test_servers_that_end_finish_answers_and_stop_ingests_and_leave_no_process(
    server: Server, two: Two
) -> None:
    """The last test: it ends the servers, begins others on their folder, and kills those."""
    texts = {f"{n}": f"The village of Delta{n} has {n} houses. {FILLER}" for n in range(100)}

    def told(client: httpx.Client) -> None:
        with contextlib.suppress(httpx.TransportError):
            client.put("/v1/kb/collections/long", json={"documents": texts})

    ingesting = threading.Thread(target=told, args=(two[1],))
    ingesting.start()
    body = {"model": DEFAULT_MODEL, "prompt": "Once upon a time", "max_tokens": 64, "stream": True}
    body |= {"ignore_eos": True}
    family = server.family()
    until(lambda: server.chunks()["pending"], every_s=0.1)
    with two[0].stream("POST", COMPLETIONS, json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        assert "data: [DONE]" in list(lines)
    server.process.wait(60)
    ingesting.join()
    assert psutil.wait_procs(family, timeout=10)[1] == []
    again = Server(server.folder, "--api-server-count", "2").wait()
    assert again.client.get(KB).json()["ids"] == sorted(TEXTS)
    totals = again.chunks()
    assert totals["chunks"] == len(TEXTS) + len(texts)
    assert totals["ready"] + totals["pending"] == totals["chunks"]
    family = again.family()
    psutil.Process(again.process.pid).send_signal(signal.SIGKILL)
    again.process.wait(10)
    assert psutil.wait_procs(family, timeout=10)[1] == []
