"""``blendrag bench kernels``, tiny, on the engine that the other tests use."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import Result

from blendrag.errors import ModelNotSupportedError
from workbench import FIRST, Bench, distance

pytestmark = pytest.mark.engine


def test_piece_is_left_out_or_the_store_stays_behind(
    command: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = command("bench", "kernels", "--chunks", "2", "--chunk-tokens", "64", "--repeats", "2", "--json")
    found = json.loads(result.stdout)
    shape, pieces = found["shape"], found["pieces"]
    assert shape["cached"] == 128 and shape["tokens"] - shape["cached"] + round(0.15 * 128) == shape["rows"]
    assert all(piece["best_ms"] > 0 for piece in pieces.values())
    assert {name for name, piece in pieces.items() if not piece["floor_ms"]} == {"metadata"}
    assert found["blend"]["ttft_ms"]["median"] > 0
    assert "TTFT" in result.stderr and not list(tmp_path.iterdir())


def test_timing_touches_the_kv_of_requests(bench: Bench) -> None:
    prompt = bench.prompt(bench.pieces[:3])
    before = bench.plain(prompt)
    spans = [[start, length] for _, start, length in prompt.spans]
    bench.engine.call("kernels", len(prompt.token_ids), spans, 0.3, 1)
    after = bench.engine.generate(prompt.token_ids, FIRST)
    assert after.prefix_tokens > 0, "nothing of the first request was used again: this test shows nothing"
    assert distance(before, after) < 1e-3


def test_model_whose_layers_run_whole_is_measured_wrongly() -> None:
    from blendrag.lab.worker.kernels import LayerPieces

    whole: Any = SimpleNamespace(decoder=SimpleNamespace(model=SimpleNamespace()))
    with pytest.raises(ModelNotSupportedError, match="not measured"):
        LayerPieces(whole, 100, [(10, 50)], 0.15)
