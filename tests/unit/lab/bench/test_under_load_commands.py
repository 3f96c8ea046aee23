"""``bench load`` and ``beside``: what they print and draw."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from blendrag.lab.bench.load_report import draw_beside, draw_load, print_beside, print_load

MACHINE = {"cpu": "A CPU [model]", "threads": 2, "model": "/models/some-model"}
CONFIG = {
    "chunks": 6, "chunk_tokens": 512, "ratio": 0.15, "codec": "raw", "selector": "hkvd", "repeats": 4,
    "questions": 40, "pool": 48, "prompt_tokens": [1540, 1571],
    "max_tokens": 16, "seconds": 24.0, "decodes": 2, "arrivals": 4,
}  # fmt: skip


def spread(median: float) -> dict[str, float]:
    return {"median": median, "p10": 0.9 * median, "p90": 1.1 * median}


def latency(p50: float) -> dict[str, float]:
    return {"p50": p50, "p95": 2 * p50, "max": 3 * p50}


def load_results() -> dict[str, Any]:
    def run(rate: float, ms: float) -> dict[str, Any]:
        return {
            "rate": rate, "arrived_per_s": rate, "completed_per_s": rate, "ttft_ms": latency(ms),
            "itl_ms": latency(14) if rate < 2 else None, "saturated": 0.4, "not_blended": int(rate),
        }  # fmt: skip

    def arm(rate: float | None, *runs: dict[str, Any]) -> dict[str, Any]:
        found = {"per_s": rate, "past": rate != 3.0, "vs_full": rate, "vs_prefix": None}
        return found | {"alone": {"ttft_ms": 800.0, "total_ms": 1000.0}, "runs": list(runs)}

    arms = {
        "full": arm(1.0, run(1.0, 700), run(1.5, 4000)),
        "prefix": arm(None, run(1.5, 1300)),
        "blended": arm(3.0, run(1.5, 300), run(3.0, 600)),
    }
    return {"arms": arms, "bound_ms": 1600.0}


def beside_results() -> dict[str, Any]:
    def own(ms: float, ttft: float | None) -> dict[str, Any]:
        return {"itl_ms": latency(ms), "during_ms": latency(ms), "arrival_ttft_ms": ttft and spread(ttft)}

    ratio = {key: spread(2.5) for key in ("p50", "p95", "max")}
    trace = [[0.1 * at, 12.0 + at] for at in range(30)]
    return {
        "conditions": {"alone": own(12, None), "full": own(300, 2100), "blended": own(25, 600)},
        "ratios": {name: {"itl": ratio, "during": ratio} for name in ("full", "blended")},
        "gap": 2.75,
        "trace": {name: trace for name in ("alone", "full", "blended")},
    }


CASES: list[tuple[dict[str, Any], Callable[..., None], Callable[..., None], tuple[str, ...]]] = [
    (load_results(), print_load, draw_load,
     ("8,000 >", "none", "3.00 at least", "3.00x", "40%", "7 requests were")),
    (beside_results(), print_beside, draw_beside, ("blended", "900", "2.50x", "one every 2.75 s")),
]  # fmt: skip


@pytest.mark.parametrize(("results", "table", "draw", "shown"), CASES)
def test_table_is_cut_off_or_picture_is_see_through(
    results: dict[str, Any],
    table: Callable[..., None],
    draw: Callable[..., None],
    shown: tuple[str, ...],
    tmp_path: Path,
) -> None:
    results = {**results, "machine": MACHINE, "config": CONFIG}
    printed = io.StringIO()
    table(results, Console(file=printed, width=80))
    text = printed.getvalue()
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    assert all(part in " ".join(text.split()) for part in (*shown, "A CPU [model]"))
    draw(results, tmp_path / "out.png")
    pixels = imread(tmp_path / "out.png")
    assert pixels.shape[2] == 3 or bool(np.all(pixels[:, :, 3] == 1.0))
    assert np.allclose(pixels[0, 0, :3], 1.0)
    assert len(np.unique(pixels[:, :, :3].reshape(-1, 3), axis=0)) > 5
