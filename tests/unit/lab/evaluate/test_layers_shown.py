"""``bench layers``: the prompts it probes, and what it shows."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from blendrag.lab.evaluate.layer_statistics import summarise_probes
from blendrag.lab.evaluate.layers import RATIOS, LayerOptions, _reader
from blendrag.lab.evaluate.layers_plot import draw_layers
from blendrag.lab.evaluate.layers_table import print_layers
from blendrag.settings import Settings


@pytest.fixture
def results() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    deviation = {metric: [[0.0] * 20, *rng.exponential(size=(12, 20)).tolist()] for metric in ("v", "k")}
    curves = [[[1 - ratio] * 12 for ratio in RATIOS] for _ in range(4)]
    attention = dict(zip(("hkvd", "hkvd_each", "first_k", "random"), curves, strict=True))
    return summarise_probes([{"deviation": deviation, "attention": attention}] * 2, RATIOS) | {
        "machine": {"model": "models/tiny", "dtype": "bfloat16", "cpu": "a CPU", "threads": 2},
        "config": {
            "data": None, "format": "jsonl", "codec": "raw", "shared_prefix": "start",
            "prompt_tokens": [700, 900],
        },
    }  # fmt: skip


def test_layer_or_ratio_is_cut_off(results: dict[str, Any]) -> None:
    printed = io.StringIO()
    print_layers(results, Console(file=printed, width=100))
    text = printed.getvalue()
    assert "…" not in text and "│ 15%        │ 0.850 (0.850-0.850) │" in text
    assert "2 prompts of 700 to 900 tokens, built-in text; codec raw, shared prefix start" in " ".join(
        text.split()
    )


def test_picture_is_see_through_or_does_not_say_where_it_is_from(
    results: dict[str, Any], tmp_path: Path
) -> None:
    draw_layers(results, tmp_path / "layers.png")
    pixels = imread(tmp_path / "layers.png")
    assert pixels.shape[2] == 3 or bool(np.all(pixels[:, :, 3] == 1.0))
    draw_layers(results, tmp_path / "layers.svg")
    assert "<!-- tiny on a CPU, 2 threads -->" in (tmp_path / "layers.svg").read_text()


def test_pieces_of_a_document_are_probed_as_documents(tokenizer: Any, tmp_path: Path) -> None:
    row = {"question": "Where?", "answer": "Here.", "documents": ["It is here. " * 12, "It is not there."]}
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(row))
    settings = Settings.load(chunk_tokens=16)
    _, asked = _reader(settings, LayerOptions(data=path))
    (found,) = asked(tokenizer)
    assert len(found.documents) == 2
    assert len(found.documents[0]) > 1 and {len(piece) for piece in found.documents[0][:-1]} == {16}
