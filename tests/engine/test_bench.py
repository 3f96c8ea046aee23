"""The benchmark, tiny, on the engine that the other tests use."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from blendrag.engine.client.engine import Engine
from blendrag.engine.client.generation import Sampling

pytestmark = pytest.mark.engine


def test_tiny_bench_measures_all_arms_and_leaves_nothing_behind(
    engine: Engine, command: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    plot = tmp_path / "out.png"
    result = command(
        "bench", "ttft", "--chunks", "2", "--chunk-tokens", "64", "--repeats", "1", "--ratios", "0.25,1",
        "--json", "--plot", str(plot),
    )  # fmt: skip
    results = json.loads(result.stdout)
    arms = results["arms"]
    assert list(arms) == ["full", "prefix", "reuse", "blend@0.25", "blend@1"]
    assert [arm["tokens_recomputed"] for arm in arms.values()] == [128, 128, 0, 32, 128]
    assert all(arm["ttft_ms"]["median"] > 0 for arm in arms.values())
    assert arms["blend@1"]["kl_first_token"] < 1e-3 and arms["blend@1"]["top1_agreement"] == 1
    assert results["ingest"]["tokens"] == 8 * 64 and results["ingest"]["ratio_to_plain"] > 0
    assert results["machine"]["model"] and results["machine"]["vllm"]
    assert "blend@0.25" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == [plot.name]
    assert engine.generate([1, 2, 3], Sampling(max_tokens=1)).token_ids  # the shared engine still serves
