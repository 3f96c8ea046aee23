"""What ``bench kernels`` shows to people."""

from __future__ import annotations

from rich.console import Console

from blendrag.lab.bench.floors import LAYER
from blendrag.lab.bench.kernels import KernelResults
from blendrag.lab.report import table_with, where

_NAMES = {
    "rotate": "rotate stored K",
    "write_stored": "write stored KV",
    "qkv": "norm, QKV, RoPE",
    "write": "write fresh KV",
    "attention": "attention",
    "o_proj": "output projection",
    "mlp": "norm, MLP",
    "select": "deviation, selection",
    "gather": "gather rows",
    "metadata": "attention metadata",
}


def print_kernels(results: KernelResults, console: Console) -> None:
    """A row per piece: time, floor and what is between; then the blend as a whole."""
    pieces = results.floors.pieces
    table = table_with("piece", "best ms", "median", "floor", "by", "best/floor", "times", "over")
    for name in (*LAYER, *(name for name in pieces if name not in LAYER)):
        piece = pieces[name]
        table.add_row(
            _name(name),
            f"{piece.best_ms:.2f}",
            f"{piece.median_ms:.2f}",
            f"{piece.floor_ms:.2f}" if piece.floor_ms else "-",
            piece.bound.replace("none", ""),
            f"{piece.ratio:.1f}x" if piece.ratio else "-",
            str(piece.count),
            f"{piece.over_ms:.1f}",
        )
    for part in (_layer(results), table, _LEGEND, _blend(results), _facts(results)):
        console.print(part, markup=False)


def _name(piece: str) -> str:
    return _NAMES[piece.removesuffix("_all")] + (", all rows" if piece.endswith("_all") else "")


_LEGEND = (
    "floor: operations at the best rate of multiplying, or bytes at the best rate of copying, whichever is"
    " longer. times, over: how often in a blend, and its ms above the floor there.\n"
)


def _layer(results: KernelResults) -> str:
    shape, rates = results.floors.shape, results.floors.rates
    return (
        f"One layer of {shape.layers}: {shape.rows:,} of {shape.tokens:,} tokens in {shape.runs:,} runs,"
        f" {shape.cached:,} stored. Multiplying {rates.flops / 1e9:,.0f} GFLOP/s ({rates.flops_of}), copying"
        f" {rates.bytes / 1e9:,.1f} GB/s ({rates.bytes_of})."
    )


def _blend(results: KernelResults) -> str:
    ttft, pieces = results.ttft_ms.median, results.floors.pieces
    floor, known, full = results.floors.floor_ms, results.floors.pieces_ms, results.floors.full_floor_ms
    lost = sorted(pieces, key=lambda name: -pieces[name].over_ms)[:3]
    worst = "; ".join(f"{_name(name)} {pieces[name].over_ms:,.0f} ms" for name in lost)
    return (
        f"A blend: TTFT {ttft:,.0f} ms = floor {floor:,.0f} + pieces above it {known - floor:,.0f}"
        f" + everything else {ttft - known:,.0f}. TTFT is {ttft / floor:.1f}x the floor, the pieces"
        f" {known / floor:.1f}x.\n"
        f"The floor of a full prefill is {full:,.0f} ms: {full / floor:.1f}x a blend's. Most lost: {worst}.\n"
    )


def _facts(results: KernelResults) -> str:
    setup, options = results.setup, results.setup.options
    return (
        f"{options.chunks} chunks of {options.chunk_tokens} tokens, {options.ratio:.0%} recomputed, mask"
        f" {setup.mask}, {options.repeats} times each, in {setup.machine.dtype}; {where(setup.machine)}."
    )
