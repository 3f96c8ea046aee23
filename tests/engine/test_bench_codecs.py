"""``blendrag bench codecs``, tiny, on the engine that the other tests use."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

pytestmark = pytest.mark.engine


def test_codec_changes_what_is_recomputed_or_leaves_its_store_behind(
    command: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = command(
        "bench", "codecs", "--chunks", "2", "--chunk-tokens", "64", "--repeats", "1", "--json", "-"
    )
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
