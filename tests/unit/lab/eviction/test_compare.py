"""``bench eviction``: what it compares, writes, prints and draws."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from blendrag.cli.bench import app
from blendrag.eviction import POLICIES
from blendrag.lab.eviction.compare import run_eviction
from blendrag.lab.eviction.source import TraceSource, dialog_trace
from blendrag.lab.eviction.trace import Dialog, DialogTurn, Request, RequestTrace
from blendrag.lab.options import EvictionOptions
from blendrag.progress import SILENT


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 100 * i, "input_length": 1000, "hash_ids": [0, 1 + i % 7]} for i in range(60)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def talks() -> list[Dialog]:
    turns = (DialogTurn(role="user", text="more " * 40), DialogTurn(role="assistant", text="so " * 60))
    return [Dialog(id=f"c{i}", turns=turns * (1 + i % 5)) for i in range(80)]


def test_json_has_what_scripts_read(trace: Path) -> None:
    arguments = ["eviction", "--trace", str(trace), "--sizes", "4,2,8", "--policies", "lru,gdsf", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    written = json.loads(result.stdout)
    assert written["sizes"] == [2, 4, 8]
    assert list(written["policies"]) == ["lru", "gdsf", "optimal"]
    assert all(len(values) == 3 for values in written["policies"].values())
    assert written["policies"]["lru"][2] == written["policies"]["optimal"][2] > 0.7
    assert len(written["closed"]["gdsf"]) == 3
    assert "closed" in result.output and "blocks" in result.output


def test_all_policies_and_optimum_on_dialogues() -> None:
    source = TraceSource(
        lambda seed: dialog_trace(talks(), seconds=300.0, gap_s=20.0, active=10, seed=seed), generated=True
    )
    options = EvictionOptions(Path("t"), "1000,4000", seeds=3)
    results = run_eviction(source, options, SILENT)
    assert set(results.policies) == {*POLICIES, "optimal"}
    assert results.config["traces"] == 3
    for name, hits in results.policies.items():
        assert all(hit <= best for hit, best in zip(hits, results.policies["optimal"], strict=True)), name
    assert results.policies["lpc"] == results.policies["lru"]  # nobody told it anything


def test_warm_up_is_not_counted(trace: Path) -> None:
    ratios = []
    for warmup in ("0", "0.5"):
        arguments = ["--trace", str(trace), "--sizes", "8", "--policies", "lru", "--warmup", warmup]
        result = CliRunner().invoke(app, ["eviction", *arguments, "--json"], catch_exceptions=False)
        ratios += json.loads(result.stdout)["policies"]["lru"]
    assert ratios[0] < ratios[1] == 1.0


def test_gap_that_is_closed_is_the_share_of_the_optimums() -> None:
    requests = [Request(float(at), (key,), (1,)) for at, key in enumerate("abcdaabcdbaabcd" * 3)]
    source = TraceSource(
        lambda seed: RequestTrace("t", requests, prefix=False, unit="blocks"), generated=False
    )
    results = run_eviction(source, EvictionOptions(Path("t"), "2,3,9", "lru,lfu"), SILENT)
    for place in (0, 1):
        low, own, high = (results.policies[name][place] for name in ("lru", "lfu", "optimal"))
        assert results.closed["lfu"][place] == pytest.approx((own - low) / (high - low))
    assert results.closed["lfu"][2] is None, "there is no gap"
    assert set(results.closed) == {"lfu", "optimal"}
    alone = run_eviction(source, EvictionOptions(Path("t"), "2", "lfu"), SILENT)
    assert not alone.closed
