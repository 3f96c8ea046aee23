"""``blendrag bench load``, its modes, and ``ttft --speculate``, tiny, on the engine of the other tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from blendrag.engine.client.engine import Engine
from blendrag.engine.client.generation import Sampling

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


Run = Callable[..., dict[str, Any]]


@pytest.fixture
def bench_run(command: Callable[..., Result]) -> Run:
    """The results of a ``blendrag bench`` command over prompts of two chunks."""

    def run(*words: str) -> dict[str, Any]:
        result = command("bench", *words, "--chunks", "2", "--chunk-tokens", "64", "--json")
        results: dict[str, Any] = json.loads(result.stdout)
        return results

    return run


def test_arms_take_what_is_their_own_and_are_asked_at_the_same_rates(
    engine: Engine, bench_run: Run, tmp_path: Path
) -> None:
    results = bench_run(
        "load", "--pool", "8", "--seconds", "3", "--tries", "2", "--max-tokens", "3",
        "--plot", str(tmp_path / "out.png"),
    )  # fmt: skip
    arms = results["arms"]
    assert list(arms) == ["full", "prefix", "blended"]
    for arm in arms.values():
        rates = [run["rate"] for run in arm["runs"]]
        assert len(rates) == 2 and rates == sorted(rates)
        for run in arm["runs"]:
            assert run["requests"] > 0 and run["not_blended"] == 0
    assert results["bound_ms"] == 2 * arms["full"]["alone"]["ttft_ms"]
    assert max(run["reused_tokens"] for run in arms["full"]["runs"]) == 0
    assert min(run["reused_tokens"] for run in arms["blended"]["runs"]) >= 2 * 64
    assert (tmp_path / "out.png").stat().st_size > 1000
    assert engine.reset_prefix_cache(), "requests were left behind"


def test_tree_takes_exact_kv_only_and_finds_it(
    engine: Engine, command: Callable[..., Result], texts: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # This engine:
    monkeypatch.setattr("blendrag.lab.bench.tree._small_pool", lambda settings, tokens: settings)
    data = tmp_path / "squad.json"
    asked = [{"context": text, "qas": [{"question": f"What is {text[:40]}?"}]} for text in texts]
    data.write_text(json.dumps([{"paragraphs": asked}]))
    result = command(
        "bench", "tree", "--data", str(data), "--top-k", "2", "--earlier", "40", "--alone", "4",
        "--tries", "1", "--requests", "6", "--max-tokens", "2", "--json", "--plot", str(tmp_path / "out.png"),
        BLENDRAG_MIN_CACHED_TOKENS="0",
    )  # fmt: skip
    results = json.loads(result.stdout)
    arms = {name: arm["runs"][0] for name, arm in results["arms"].items()}
    assert list(arms) == ["full", "prefix", "tree", "blended", "unmixed", "both"]
    assert all(run["requests"] > 0 and run["not_blended"] == 0 for run in arms.values())
    assert arms["full"]["reused_tokens"] == arms["blended"]["exact_tokens"] == 0
    assert arms["tree"]["exact_tokens"] > 64 < arms["both"]["exact_tokens"]
    assert arms["both"]["reused_tokens"] > 2 * 64
    assert arms["unmixed"]["exact_tokens"] <= arms["both"]["exact_tokens"]
    assert {(one["arm"], one["against"]) for one in results["compared"]} == {
        ("tree", "prefix"), ("unmixed", "blended"), ("both", "blended"),
    }  # fmt: skip
    assert (tmp_path / "out.png").stat().st_size > 1000
    assert engine.reset_prefix_cache(), "requests were left behind"


def test_answers_have_times_and_leave_nothing_behind(
    engine: Engine, bench_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blendrag.lab.bench.beside.DECODE_TOKENS", 12)  # so that one begins when one ends
    results = bench_run("load", "--beside", "--repeats", "2", "--plot", str(tmp_path / "out.png"))
    conditions = results["conditions"]
    assert list(conditions) == ["alone", "full", "blended", "slow", "ingest"]
    for name, found in conditions.items():
        assert 0 < found["itl_ms"]["p50"] <= found["itl_ms"]["p95"] <= found["itl_ms"]["max"]
        assert (found["arrival_ms"] is None) == (name == "alone")
        times = [at for at, _ in results["trace"][name]]
        assert times == sorted(times) and times[-1] > 0
    assert engine.reset_prefix_cache(), "decodes were left behind"
    assert engine.generate([1, 2, 3], Sampling(max_tokens=1)).token_ids


def test_answer_begun_early_saves_time_and_leaves_nothing_behind(engine: Engine, bench_run: Run) -> None:
    waits = bench_run("ttft", "--speculate", "--repeats", "4")["waits"]
    assert len(waits) == 3
    longest = waits[-1]
    assert longest["wait_s"] > longest["ttft_s"] > 0
    assert longest["saved_s"]["1.0"]["mean"] > 0
    assert engine.reset_prefix_cache(), "requests were left behind"
