"""Two ranks behind ``blendrag serve``, and before ``blendrag doctor``: a small model with random weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blendrag.lab.doctor import run_doctor
from blendrag.settings import Settings
from quantised_model import small_model
from served import TEXTS, Server, text_of

pytestmark = [
    pytest.mark.own_engine,
    pytest.mark.nightly(part="ranks"),
    pytest.mark.xdist_group("ranks"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    return small_model(tmp_path_factory.mktemp("ranks") / "model", tokenizer)


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[Server]:
    running = Server(tmp_path / "kv", "--model", str(model), "-tp", "2").wait()
    yield running
    if running.process.poll() is None:
        running.end()


def test_ranks_behind_a_server_blend_what_it_was_told(server: Server, model: Path) -> None:
    assert server.put(TEXTS)["chunks"] == len(TEXTS)
    evidence = server.ask(model=str(model)).json()["blendrag"]
    assert evidence["plain"] is None
    assert evidence["reused"] > evidence["recomputed"] > 0
    plain, whole = (
        text_of(server.ask(model=str(model), max_tokens=24, blendrag=said))
        for said in ({"blend": False}, {"recompute_ratio": 1.0})
    )
    assert whole == plain
    assert server.client.delete("/v1/kb/collections/cities").json() == {"removed": len(TEXTS)}
    assert server.end() == []


def test_doctor_finds_two_ranks_well(model: Path) -> None:
    settings = Settings.load(
        model=str(model),
        dtype="float32",
        max_model_len=2048,
        kv_cache_gib=1,
        engine_args={"tensor_parallel_size": 2},
    )
    report = run_doctor(settings)
    assert report.passed, report
