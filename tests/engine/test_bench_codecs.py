"""``blendrag bench codecs``, tiny, on the engine that the other tests use."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from blendrag.cli.app import app
from blendrag.engine.handle import Engine

pytestmark = pytest.mark.engine


def test_codec_changes_what_is_recomputed_or_leaves_its_store_behind(
    engine: Engine, engine_options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    options = {f"BLENDRAG_{name.upper()}": str(value) for name, value in engine_options.items()}
    result = CliRunner(env={**options, "COLUMNS": "80", "NO_COLOR": "1"}).invoke(
        app,
        ["bench", "codecs", "--chunks", "2", "--chunk-tokens", "64", "--repeats", "1", "--json", "-"],
    )
    assert result.exit_code == 0, result.stderr
    codecs = json.loads(result.stdout)["codecs"]
    assert set(codecs) == {"raw", "fp8", "int8", "int4"}
    for name, codec in codecs.items():
        assert list(codec["ratios"]) == ["0", "0.15", "1"]
        assert codec["ratios"]["1"]["kl_from_raw"] < 1e-3 and codec["ratios"]["1"]["top1_agreement"] == 1
        assert (codec["ratios"]["0"]["kl_from_raw"] > 0) == (name != "raw")
        assert (codec["k_error"] > 0) == (codec["v_error"] > 0) == (name != "raw")
    int4, int8, raw = (codecs[name]["bytes_per_token"] for name in ("int4", "int8", "raw"))
    assert int4 < int8 < raw
    assert not list(tmp_path.iterdir())
