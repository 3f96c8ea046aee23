"""The table of ``bench beside``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from blendrag.lab.canvas import where
from blendrag.lab.report import table_with

_KEYS = ("p50", "p95", "max")


def print_beside(results: Mapping[str, Any], console: Console) -> None:
    """A row per condition: inter-token latency, and what it is of that without arrivals."""
    itl = table_with("beside", "ITL p50", "p95", "max ms", "during p50", "p95", "max ms", "their TTFT")
    ratios = table_with("/ alone", "ITL p50", "p95", "max", "during p50", "p95", "p10-p90", "max")
    for name, own in results["conditions"].items():
        ttft = own["arrival_ttft_ms"]
        itl.add_row(
            name,
            *(f"{own['itl_ms'][key]:,.0f}" for key in _KEYS),
            *(f"{own['during_ms'][key]:,.0f}" if ttft else "" for key in _KEYS),
            f"{ttft['median']:,.0f}" if ttft else "",
        )
    for name, own in results["ratios"].items():
        during = own["during"]
        ratios.add_row(
            name,
            *(f"{own['itl'][key]['median']:.2f}x" for key in _KEYS),
            *(f"{during[key]['median']:.2f}x" for key in ("p50", "p95")),
            f"{during['p95']['p10']:.1f}-{during['p95']['p90']:.1f}",
            f"{during['max']['median']:.2f}x",
        )
    config = results["config"]
    for table in (itl, ratios):
        console.print(table, markup=False)
    console.print(
        f"ITL: between two tokens of {config['decodes']} running answers, alone, beside full prefills, and"
        " beside blends of the same prompts. during: while an arrival waited for"
        f" its first token. {config['repeats']} repeats of {config['arrivals']} arrivals each, one every"
        f" {results['gap']:.2f} s: {config['chunks']} chunks of {config['chunk_tokens']} tokens,"
        f" {config['ratio']:.0%} recomputed. {where(results['machine'])}.",
        markup=False,
    )
