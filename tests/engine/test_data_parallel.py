"""Data parallel engines: the first stores, all blend."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from served import KB, TEXTS, Server, text_of

pytestmark = [pytest.mark.own_engine, pytest.mark.nightly(part="ranks")]


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two engines, and as many API servers."""
    running = Server(tmp_path_factory.mktemp("engines") / "kv", "--data-parallel-size", "2").wait()
    assert running.put(TEXTS)["chunks"] == len(TEXTS)
    yield running
    if running.process.poll() is None:
        running.end()


def blended(server: Server) -> dict[str, float]:
    """How many prompts, by engine."""
    metrics = server.client.get("/metrics").text
    lines = re.findall(r'^blendrag_requests_total\{engine="(\d)".*outcome="blended"\} (\S+)$', metrics, re.M)
    return {engine: float(count) for engine, count in lines}


def test_what_one_engine_has_stored_is_reused_by_another(server: Server) -> None:
    before, counts = blended(server), []
    for n in range(6):
        more = {"stream": True, "blendrag": {"evidence": True}}
        lines = [
            line for line in server.ask(f"Question {n}?", server.connect(), **more).text.splitlines() if line
        ]
        counts.append(json.loads(lines[-2].removeprefix("data: "))["blendrag"])
    assert all(count["plain"] is None and count["reused"] > count["recomputed"] > 0 for count in counts)
    after = blended(server)
    assert set(after) == {"0", "1"}
    assert all(count > before[engine] for engine, count in after.items()), "both have blended"


def test_engines_give_the_same_answer(server: Server) -> None:
    answers = {
        text_of(server.ask(f"Who founded Alpha{n % 2}?", server.connect(), cache_salt=str(n)))
        for n in range(0, 8, 2)
    }
    assert len(answers) == 1


def test_what_one_engine_finds_damaged_is_repaired(server: Server) -> None:
    (record,) = sorted(server.folder.glob("kv/??/*.safetensors"))[:1]
    data = bytearray(record.read_bytes())
    data[-1] ^= 1
    record.write_bytes(data)
    more = {"blendrag": {"recompute_ratio": 0.2}}
    for n in range(8):
        assert server.ask(f"Is it whole? {n}", server.connect(), **more).status_code == 200
    chunks = server.client.get("/v1/kb/stats").json()["chunks"]
    assert chunks["ready"] == len(TEXTS)


def test_text_that_was_forgotten_is_blended_by_no_engine(server: Server) -> None:
    assert server.client.delete(KB, params={"id": "city-0"}).json() == {"removed": 1}
    answers = [server.ask(f"And now? {n}", server.connect()).json()["blendrag"] for n in range(4)]
    assert len({answer["fresh"] + answer["prefix"] for answer in answers}) == 1
    assert server.put(TEXTS)["chunks"] == 1


def test_killed_server_leaves_no_process(server: Server) -> None:
    """The last test."""
    family = server.family()
    server.process.kill()
    server.process.wait(10)
    assert psutil.wait_procs(family, timeout=10)[1] == []
