"""`blendrag bench ttft` and `load` on long prompts. Every arm is checked to be what it is called."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from blendrag.engine.client.engine import Engine
from blendrag.lab.bench.load import run_load
from blendrag.lab.bench.timed import exactly
from blendrag.lab.bench.ttft import run_ttft
from blendrag.lab.options import LoadOptions, TtftOptions
from blendrag.progress import SILENT
from blendrag.settings import Settings
from device import DEVICE
from tables import Tables

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

if DEVICE == "cuda":  # 4K, 8K and 32K tokens with all that stands around them
    CHUNK_TOKENS, CHUNKS, REPEATS, SECONDS, TOKENS, TRIES = 512, (8, 16, 62), 3, 4.0, 16, 2
else:
    CHUNK_TOKENS, CHUNKS, REPEATS, SECONDS, TOKENS, TRIES = 48, (4,), 1, 1.0, 4, 1
RATIOS = (0.05, 0.15, 0.3)
QUESTION = 512  # tokens, with system text and template, at most


@pytest.fixture(params=CHUNKS)
def chunks(request: pytest.FixtureRequest, engine: Engine) -> int:
    """Of a prompt."""
    count: int = request.param
    if count * CHUNK_TOKENS + QUESTION > engine.max_model_len:
        pytest.skip("longer than the model's window")
    return count


def test_prompt_of_this_length_is_blended(
    chunks: int, engine: Engine, settings: Settings, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blendrag.lab.bench.ttft._POOL", 1)  # no more is stored than a prompt has
    options = TtftOptions("ratio", RATIOS, chunks, CHUNK_TOKENS, REPEATS)
    results = run_ttft(settings, options, SILENT)
    keep("ttft", results.to_dict())
    results.show(tables.console)
    assert {f"blend@{ratio:g}" for ratio in RATIOS} <= results.arms.keys()


def test_requests_of_this_length_are_blended_under_load(
    chunks: int, engine: Engine, settings: Settings, tables: Tables
) -> None:
    for token in (5, 6):  # the first one warms up
        begin = time.perf_counter()
        engine.generate([token] * chunks * CHUNK_TOKENS, exactly(TOKENS))
        alone = time.perf_counter() - begin
    seconds = max(SECONDS, 6 * alone)  # three requests at the lowest rate, half of what it can do alone
    options = LoadOptions(chunks, CHUNK_TOKENS, max(16, chunks), TOKENS, seconds, TRIES)
    results = run_load(settings, options, SILENT)
    keep("load", results.to_dict())
    results.show(tables.console)
    assert not any(run.not_blended for run in results.arms["blended"].runs)


def keep(bench: str, results: dict[str, Any]) -> None:
    """Beside the tables, for pictures and pages."""
    if tables := os.environ.get("GPU_TABLES"):
        with Path(tables).with_suffix(".jsonl").open("a", encoding="utf-8") as file:
            print(json.dumps({"bench": bench} | results, default=str), file=file)
