"""``blendrag bench codecs`` without an engine: its numbers, its table, its refusals."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from blendrag.cli.app import app
from blendrag.lab.arms import Sample
from blendrag.lab.bench.codecs import compare, measure_codec
from blendrag.lab.bench.codecs_table import print_codecs
from blendrag.lab.report import to_json
from blendrag.store.codec import codec_names, make_codec


def sample(token: int, likely: float, ttft_ms: float = 100.0) -> Sample:
    """A first token whose candidates 1 and 2 have the probabilities ``likely`` and the rest."""
    return Sample(ttft_ms, token, {1: math.log(likely), 2: math.log(1 - likely)}, 0, {})


def test_codec_is_compared_with_anything_but_raw_at_its_own_ratio() -> None:
    samples = {
        ("raw", 0.0): [sample(1, 0.75), sample(1, 0.75)],
        ("raw", 1.0): [sample(2, 0.01), sample(2, 0.01)],
        ("int8", 0.0): [sample(1, 0.75, 40.0), sample(2, 0.25, 60.0)],
        ("full", 1.0): [sample(1, 0.25), sample(1, 0.25)],
    }
    apart = 0.75 * math.log(3) - 0.25 * math.log(3)
    found = compare(samples, "int8", 0.0)
    assert found["kl_from_raw"] == pytest.approx(apart / 2, rel=1e-6)
    assert found["kl_from_raw_p90"] == pytest.approx(0.9 * apart, rel=1e-6)
    assert found["kl_from_full"] == pytest.approx(apart / 2, rel=1e-6)
    assert (found["top1_agreement"], found["ttft_ms"]) == (0.5, 50.0)
    assert compare(samples, "raw", 0.0)["kl_from_raw"] == 0


def test_measuring_a_codec_leaves_torch_with_one_thread_or_finds_an_error_in_raw() -> None:
    records = [torch.randn(2, 2, 40, 2, 32).to(torch.bfloat16) for _ in range(2)]
    before = torch.get_num_threads()
    found = {name: measure_codec(make_codec(name, 2, 32, torch.bfloat16), records) for name in codec_names()}
    assert torch.get_num_threads() == before
    assert (found["raw"]["k_error"], found["raw"]["v_error"]) == (0, 0)
    assert found["raw"]["bytes_per_token"] == 2 * 2 * 2 * 32 * 2
    assert 0 < found["int8"]["k_error"] < found["fp8"]["k_error"] < found["int4"]["k_error"] < 0.2
    assert all(each[f"{way}_gb_s"] > 0 for each in found.values() for way in ("encode", "decode"))


@pytest.fixture
def results() -> dict[str, Any]:
    cost = {"k_error": 0.0034, "v_error": 0.0074, "encode_gb_s": 0.9, "decode_gb_s": 3.0}
    drift = {"kl_from_raw": 0.0017, "kl_from_raw_p90": 0.01, "top1_agreement": 0.98}
    drift |= {"kl_from_full": 0.06, "ttft_ms": 480.0}
    ratios = {"0": drift, "0.15": drift, "1": drift}
    return {
        "codecs": {
            "int8": cost | {"bytes_per_token": 11745.0, "ratios": ratios},
            "raw": cost | {"bytes_per_token": 23040.0, "ratios": ratios},
        },
        "machine": {"cpu": "A CPU [model]", "threads": 2, "model": "/models/some-model", "dtype": "bfloat16"},
        "config": {"chunks": 6, "chunk_tokens": 512, "repeats": 24},
    }


def test_table_fits_a_terminal_and_begins_with_the_largest(results: dict[str, Any]) -> None:
    printed = io.StringIO()
    print_codecs(results, Console(file=printed, width=80))
    text = printed.getvalue()
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    assert all(shown in " ".join(text.split()) for shown in ("A CPU [model]", "1.96x", "11,745", "0.0017"))
    assert text.index("raw") < text.index("int8")
    assert json.loads(to_json(results)) == results


BAD = [
    (("--data", "absent.jsonl"), "cannot read 'absent.jsonl'"),
    (("--json", "absent/out.json"), "--json absent/out.json"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_option_starts_the_engine(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("blendrag.engine.client.engine.Engine.shared", None)
    result = CliRunner().invoke(app, ["bench", "codecs", *arguments])
    assert result.exit_code == 1 and message in result.stderr
    assert result.stderr.count("\n") == 1 and not result.stdout
