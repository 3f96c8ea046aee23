"""What the benchmark prints, writes and draws."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from blendrag.errors import ConfigError
from blendrag.lab.arms import Sample
from blendrag.lab.bench.ingest import IngestCost, rounds_of
from blendrag.lab.bench.plot import check_plot_path, draw
from blendrag.lab.prompts import StoredChunk
from blendrag.lab.report import check_json_path, print_table, to_json, write_json
from blendrag.lab.statistics import summarise


@pytest.fixture
def results() -> dict[str, Any]:
    def samples(ttft: float, recomputed: int, **split: float) -> list[Sample]:
        return [Sample(ttft + i, 5, {5: -0.2, 6: -2.0 - i}, recomputed, split) for i in range(5)]

    arms = {
        "full": samples(2000, 3072),
        "prefix": samples(1900, 2560),
        "reuse": samples(150, 0, load=60, select=0, recompute=50),
        "blend@0.15": samples(480, 461, load=60, select=12, recompute=350),
    }
    cost = IngestCost(tokens=12288, nbytes=1 << 28, seconds=8.5, prefill_s=8.0, plain_s=8.0)
    return {
        "arms": summarise(arms),
        "machine": {"cpu": "A CPU [model]", "threads": 2, "device": "cpu", "model": "/models/some-model"},
        "ingest": cost.to_dict(),
        "config": {"chunks": 6, "chunk_tokens": 512, "repeats": 5, "prompt_tokens": [3140, 3142]},
    }


def test_json_has_exactly_the_promised_fields(results: dict[str, Any]) -> None:
    read = json.loads(to_json(results))
    assert list(read["arms"]) == ["full", "prefix", "reuse", "blend@0.15"]
    for arm in read["arms"].values():
        assert set(arm) == {
            "ttft_ms", "speedup_vs_full", "kl_first_token", "top1_agreement", "tokens_recomputed", "split_ms",
        }  # fmt: skip
        assert set(arm["ttft_ms"]) == set(arm["speedup_vs_full"]) == {"median", "p10", "p90"}
    assert read["arms"]["blend@0.15"]["tokens_recomputed"] == 461
    assert read["ingest"]["ratio_to_plain"] == pytest.approx(8.0 / 8.5)


def test_json_never_holds_what_other_readers_refuse(results: dict[str, Any]) -> None:
    results["arms"]["full"]["kl_first_token"] = float("nan")
    with pytest.raises(ValueError, match="JSON"):
        to_json(results)


def test_table_fits_a_terminal_and_keeps_brackets(results: dict[str, Any]) -> None:
    printed = io.StringIO()
    print_table(results, Console(file=printed, width=80))
    text = printed.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text and "A CPU [model]" in text
    assert "blend@0.15" in text and "4.15x" in text and "461" in text


def test_picture_is_opaque_white_behind_its_bars(results: dict[str, Any], tmp_path: Path) -> None:
    draw(results, tmp_path / "out.png")
    pixels = imread(tmp_path / "out.png")
    assert pixels.shape[2] == 3 or bool(np.all(pixels[:, :, 3] == 1.0))
    assert np.allclose(pixels[0, 0, :3], 1.0)
    assert len(np.unique(pixels[:, :, :3].reshape(-1, 3), axis=0)) > 5


@pytest.mark.parametrize("name", ["out.gif", "out", "absent/out.png"])
def test_picture_that_cannot_be_written_is_refused_before_measuring(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--plot"):
        check_plot_path(tmp_path / name)


def test_json_that_cannot_be_written_is_refused_before_measuring(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent" / "out.json"):
        with pytest.raises(ConfigError, match="--json"):
            check_json_path(path)


def test_json_file_is_what_was_measured(results: dict[str, Any], tmp_path: Path) -> None:
    write_json(results, tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text()) == json.loads(to_json(results))


def test_every_chunk_is_in_one_round_and_no_batch_is_too_large() -> None:
    chunks = [StoredChunk(str(i), (1,) * 100) for i in range(23)]
    rounds = rounds_of(chunks, 450)
    assert [chunk for batches in rounds for batch in batches for chunk in batch] == chunks
    assert max(len(batch) for batches in rounds for batch in batches) == 4
    assert all(len(batch) == 1 for batches in rounds_of(chunks, 50) for batch in batches)
