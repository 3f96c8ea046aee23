"""The benches without an engine: the model of the time to the first token on GPUs, and recognition."""

from __future__ import annotations

import json
from dataclasses import astuple, replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from blendrag.cli.app import app
from blendrag.errors import ConfigError
from blendrag.lab.bench.model import (
    EIGHT,
    GPUS,
    SHAPES,
    ModelOptions,
    break_even,
    estimate,
    measure,
    run_model,
    tables,
)
from blendrag.lab.bench.recognition import run_recognition
from blendrag.lab.bench.shapes import SHAPES as PROMPT_SHAPES
from blendrag.lab.options import RecognitionOptions
from blendrag.progress import SILENT
from blendrag.settings import Settings
from blendrag.tables import markdown
from places import ROOT
from stand_in_device import DEVICE, stand_in

SHAPE = st.sampled_from(sorted(SHAPES)).map(SHAPES.__getitem__)
GPU = st.sampled_from(sorted(GPUS)).map(GPUS.__getitem__)
RATE = st.sampled_from(["large", "few", "attention", "scattered", "memory", "link", "copy"])


@given(GPU, SHAPE, st.integers(256, 1 << 17), st.floats(0.01, 1), RATE)
def test_faster_part_makes_no_estimate_slower(gpu, shape, tokens, ratio, rate) -> None:  # type: ignore[no-untyped-def]
    rates = gpu.rates
    faster = replace(rates, **{rate: 2 * getattr(rates, rate)})
    one, other = (estimate(each, shape, tokens, ratio, tier=2.8e9) for each in (rates, faster))
    assert all(now <= then for now, then in zip(astuple(other), astuple(one), strict=True))
    assert one.blend_s >= other.blend_s > 0 and one.full_s > 0


def test_no_blend_is_faster_than_the_products_of_its_rows_allow() -> None:
    rates = replace(GPUS["H100"].rates, few=GPUS["H100"].rates.large)
    ideal = replace(rates, attention=1e30, scattered=1e30, memory=1e30, link=1e30, launch_s=0, chunk_s=0)
    ideal = replace(ideal, wait_s=0, token_s=0)
    found = estimate(ideal, SHAPES[EIGHT], 8192, 0.15)
    rows = 0.15 * (8192 - 100) + 100 + 75
    assert found.times == pytest.approx(8192 / rows)


def test_break_even_is_where_blending_begins_to_be_faster() -> None:
    rates, shape = GPUS["H100"].rates, SHAPES[EIGHT]
    length = break_even(rates, shape, 0.15)
    assert length is not None
    assert estimate(rates, shape, length, 0.15).times > 1 >= estimate(rates, shape, length // 2, 0.15).times
    assert break_even(rates, shape, 0.15, tier=1e6) is None


def test_tables_of_the_page_are_what_the_model_says() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    for table in tables(run_model(ModelOptions("H100"))):
        assert markdown(table) in page, markdown(table)


def test_rates_of_a_device_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _: None)
    with stand_in(monkeypatch):
        rates = measure(DEVICE, size=16)
    assert min(astuple(rates)) > 0
    assert "4,096 here" in markdown(tables(run_model(ModelOptions("H100"), rates))[0])


def test_command_says_what_it_assumes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blendrag.engine.client.engine.Engine.shared", None)
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", "ttft", "--gpu", "A100"])
    assert shown.exit_code == 0 and "A100: NVIDIA A100 data sheet" in shown.stdout
    found = json.loads(CliRunner().invoke(app, ["bench", "ttft", "--gpu", "H100", "--json"]).stdout)
    assert found["seconds"]["H100"]["4096"]["int8"]["full_s"] > 0 and found["counted"]["waits"] == 1


# -- ``bench recognition``, on a few prompts ------------------------------------------------------------


def test_documents_are_known_from_their_third_sight_on_in_every_shape(model_dir: Path) -> None:
    options = RecognitionOptions(prompts=12, documents=8, top_k=3, chunks=300)
    results = run_recognition(Settings.load(model=str(model_dir)), options, SILENT)
    assert list(results.shapes) == list(PROMPT_SHAPES) and results.searched is not None
    for name, shape in results.shapes.items():
        assert shape.later > 0.85 and shape.second < 0.1, name
        assert shape.kv > 0 and shape.tokens > 3 * 64
    console = Console(file=StringIO(), width=120)
    results.show(console)
    assert results.to_dict()["machine"]["model"] == str(model_dir)


def test_more_documents_in_a_prompt_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match="there are 3 documents"):
        RecognitionOptions(documents=3, top_k=4)
