"""``blendrag bench kernels``: the arithmetic behind its floors, and what it shows."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from blendrag.lab.bench.floors import analyse, costs, counts
from blendrag.lab.bench.kernels import KernelOptions, KernelResults, print_kernels
from blendrag.lab.setup import Setup
from blendrag.lab.statistics import Spread
from blendrag.lab.worker.operations import LayerShape, PieceTimes
from blendrag.settings import Settings
from paper_machine import MACHINE

SHAPE = LayerShape(
    layers=4, tokens=100, cached=80, rows=30, runs=9, pairs_rows=1500, pairs_all=5050, hidden=16, query=16,
    kv=8, intermediate=32, itemsize=2,
)  # fmt: skip
PRODUCTS = {
    f"{name}{end}": [[m, *rest] for rest in sizes]
    for end, m in (("", 30), ("_all", 100))
    for name, sizes in {"qkv": [[16, 32]], "o_proj": [[16, 16]], "mlp": [[16, 64], [32, 16]]}.items()
}


def measured(matmul_ms: float = 1.0, **ms: list[float]) -> PieceTimes:
    """As the worker says it; every piece 2 ms unless told."""
    times = {name: ms.get(name, [2.0, 2.0, 2.0]) for name in costs(SHAPE)}
    return PieceTimes(SHAPE, times, {"16": [matmul_ms, 2 * matmul_ms]}, {"1048576": [0.5, 1.0]})


def test_floor_counts_what_a_layer_multiplies() -> None:
    found = costs(SHAPE)
    per_row = 2 * (16 * (16 + 2 * 8) + 16 * 16 + 3 * 16 * 32)  # a multiplication and an addition per weight
    assert sum(found[name].flops for name in ("qkv", "o_proj", "mlp")) == 30 * per_row
    assert found["attention"].flops == 2 * 2 * 1500 * 16
    assert found["write_stored"].nbytes == 2 * (2 * 80 * 8) * 2
    for name, own in PRODUCTS.items():
        assert found[name].flops == sum(2 * m * k * n for m, k, n in own)


@given(st.integers(1, 500))
def test_rows_that_are_all_rows_cost_the_same_under_both_names(tokens: int) -> None:
    pairs = tokens * (tokens + 1) // 2
    found = costs(replace(SHAPE, tokens=tokens, rows=tokens, pairs_rows=pairs, pairs_all=pairs))
    for name in ("qkv", "write", "attention", "o_proj", "mlp"):
        assert found[name] == found[f"{name}_all"]


@given(st.integers(3, 100))
def test_every_layer_is_counted_once(layers: int) -> None:
    times = counts(layers)
    assert times["qkv"] + times["qkv_all"] == times["write"] + times["write_all"] == layers
    for name in ("attention", "o_proj", "mlp"):  # the last layer's output is not used
        assert times[name] + times[f"{name}_all"] == layers - 1
    assert times["rotate"] == times["write_stored"] == layers - 2  # the check layer and below are fresh
    assert set(times) == set(costs(SHAPE)), "a piece is not counted, or not measured"


@given(st.floats(0.01, 100), st.floats(0.01, 100))
def test_no_product_is_faster_than_its_floor(matmul_ms: float, mlp_ms: float) -> None:
    found = analyse(measured(matmul_ms, mlp=[mlp_ms, 2 * mlp_ms]))
    for name in PRODUCTS:
        piece = found.pieces[name]
        if piece.bound == "matmul":
            assert piece.ratio and piece.ratio >= 1 - 1e-9, f"{name} beats what is called its floor"


def test_blend_is_the_sum_of_its_pieces() -> None:
    found = analyse(measured())
    above = sum(piece.over_ms for piece in found.pieces.values())
    assert found.pieces_ms - found.floor_ms == pytest.approx(above)
    assert found.full_floor_ms > found.floor_ms


def results() -> KernelResults:
    floors = analyse(measured(mlp_all=[900.0, 900.0]))
    setup = Setup(KernelOptions(2, 40, 0.15, 3), Settings(), MACHINE, "runs", (100,))
    return KernelResults(floors, Spread(2000.0, 1900.0, 2100.0), setup)


def test_table_names_the_distance_and_what_is_lost_most() -> None:
    shown = io.StringIO()
    print_kernels(results(), Console(file=shown, width=140))
    lost = shown.getvalue().partition("Most lost: ")[2]
    assert lost.startswith("norm, MLP, all rows "), "what is lost most comes first"
    assert "TTFT 2,000 ms" in shown.getvalue()


def test_json_has_other_fields_than_promised() -> None:
    found = json.loads(json.dumps(results().to_dict(), allow_nan=False))
    assert list(found) == ["rates", "pieces", "blend", "shape", "machine", "config"]
    assert {"best_ms", "median_ms", "floor_ms", "bound", "ratio", "count", "over_ms"} == set(
        found["pieces"]["mlp"]
    )
    assert {"ttft_ms", "pieces_ms", "floor_ms", "full_floor_ms"} == set(found["blend"])
