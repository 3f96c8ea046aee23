"""What ``bench kernels`` shows to people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from blendrag.lab.bench.floors import LAYER
from blendrag.lab.report import table_with

_NAMES = {
    "fetch": "fetch stored KV (beside)",
    "rotate": "rotate stored K",
    "write_stored": "write stored KV",
    "qkv": "norm, QKV, RoPE",
    "write": "write fresh KV",
    "attention": "attention",
    "attention_pages": "attention, over pages",
    "attention_dense": "attention, dense mask",
    "o_proj": "output projection",
    "mlp": "norm, MLP",
    "select": "deviation, selection",
    "gather": "gather rows",
    "metadata": "attention metadata",
}


def print_kernels(results: Mapping[str, Any], console: Console) -> None:
    """A row per piece: time, floor and what is between; then the blend as a whole."""
    pieces = results["pieces"]
    table = table_with(
        "piece", "best ms", "median", "floor", "by", "best/floor", "torch.mm", "share", "times", "over"
    )
    for name in (*LAYER, *(name for name in pieces if name not in LAYER)):
        _row(table, name, pieces[name])
    for part in (_layer(results), table, _LEGEND, _blend(results), _facts(results)):
        console.print(part, markup=False)


def _row(table: Any, name: str, piece: Mapping[str, Any]) -> None:
    label = _name(name)
    table.add_row(
        label,
        f"{piece['best_ms']:.2f}",
        f"{piece['median_ms']:.2f}",
        f"{piece['floor_ms']:.2f}" if piece["floor_ms"] else "-",
        piece["bound"].replace("none", ""),
        "-" if piece["ratio"] is None else f"{piece['ratio']:.1f}x",
        "" if piece["mm_ms"] is None else f"{piece['mm_ms']:.2f}",
        "" if piece["share"] is None else f"{piece['share']:.0%}",
        str(piece["count"] or ""),
        f"{piece['over_ms']:.1f}" if piece["count"] else "",
    )


def _name(piece: str) -> str:
    return _NAMES[piece.removesuffix("_all")] + (", all rows" if piece.endswith("_all") else "")


_LEGEND = (
    "floor: operations at the best rate of multiplying, or bytes at the best rate of copying, whichever is"
    " longer. torch.mm: the same products, alone. share: of a layer above the check layer. times, over: how"
    " often in a blend, and its ms above the floor there.\n"
)


def _layer(results: Mapping[str, Any]) -> str:
    shape, rates, layer = results["shape"], results["rates"], results["layer"]
    return (
        f"One layer of {shape['layers']}: {shape['rows']:,} of {shape['tokens']:,} tokens in"
        f" {shape['runs']:,} runs, {shape['cached']:,} stored. Multiplying {rates['flops'] / 1e9:,.0f}"
        f" GFLOP/s ({rates['flops_of']}), copying {rates['bytes'] / 1e9:,.1f} GB/s ({rates['bytes_of']}).\n"
        f"In one go {layer['median_ms']:.2f} ms (best {layer['best_ms']:.2f}), floor"
        f" {layer['floor_ms']:.2f} ms: {layer['best_ms'] / layer['floor_ms']:.1f}x."
    )


def _blend(results: Mapping[str, Any]) -> str:
    blend, pieces = results["blend"], results["pieces"]
    ttft, floor, known = blend["ttft_ms"]["median"], blend["floor_ms"], blend["pieces_ms"]
    lost = sorted(pieces, key=lambda name: -pieces[name]["over_ms"])[:3]
    worst = "; ".join(f"{_name(name)} {pieces[name]['over_ms']:,.0f} ms" for name in lost)
    return (
        f"A blend: TTFT {ttft:,.0f} ms = floor {floor:,.0f} + pieces above it {known - floor:,.0f}"
        f" + everything else {ttft - known:,.0f}. TTFT is {ttft / floor:.1f}x the floor, the pieces"
        f" {known / floor:.1f}x.\n"
        f"The floor of a full prefill is {blend['full_floor_ms']:,.0f} ms:"
        f" {blend['full_floor_ms'] / floor:.1f}x a blend's. Most lost: {worst}.\n"
    )


def _facts(results: Mapping[str, Any]) -> str:
    config, machine = results["config"], results["machine"]
    return (
        f"{config['chunks']} chunks of {config['chunk_tokens']} tokens, {config['ratio']:.0%} recomputed,"
        f" mask {config['mask']}, {config['repeats']} times each; {machine['model']} ({machine['dtype']}) on"
        f" {machine['cpu']}, {machine['threads']} threads."
    )
