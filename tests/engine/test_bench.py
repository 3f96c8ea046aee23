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


@pytest.mark.nightly
def test_tiny_bench_measures_all_arms_and_leaves_nothing_behind(
    engine: Engine, command: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    plot = tmp_path / "out.png"
    result = command(
        "bench", "ttft", "--chunks", "2", "--chunk-tokens", "64", "--repeats", "2", "--ratios", "0.25,1",
        "--json", "--plot", str(plot),
    )  # fmt: skip
    results = json.loads(result.stdout)
    arms = results["arms"]
    assert list(arms) == ["full", "prefix", "exact", "exact cold", "reuse", "blend@0.25", "blend@1"]
    full, prefix, exact, cold, reuse, quarter, whole = (arm["tokens_recomputed"] for arm in arms.values())
    assert full == prefix == whole == 128 and exact == cold == 0
    assert reuse < 32, "of the block in which the documents end"
    assert quarter == reuse + round(0.25 * (128 - reuse))
    assert all(arm["ttft_ms"]["median"] > 0 for arm in arms.values())
    for arm in ("exact", "exact cold", "blend@1"):
        assert arms[arm]["kl_first_token"] < 1e-3 and arms[arm]["top1_agreement"] == 1
    assert results["machine"]["model"] and results["machine"]["vllm"]
    assert "blend@0.25" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == [plot.name]
    assert engine.generate([1, 2, 3], Sampling(max_tokens=1)).token_ids  # the shared engine still serves
