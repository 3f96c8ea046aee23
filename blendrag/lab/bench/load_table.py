"""The table of ``bench load``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from blendrag.lab.canvas import where
from blendrag.lab.report import table_with


def print_load(results: Mapping[str, Any], console: Console) -> None:
    """A row per arm and rate; then what each arm can sustain."""
    runs = table_with("arm", "rate/s", "done/s", "TTFT p50", "p95 ms", "ITL p50", "p95 ms", "queue")
    best = table_with("arm", "alone ms", "sustained/s", "/ full", "/ prefix")
    for name, arm in results["arms"].items():
        for run in arm["runs"]:
            ttft, itl = run["ttft_ms"], run["itl_ms"]
            kept = ttft["p95"] <= results["bound_ms"]
            runs.add_row(
                name,
                f"{run['rate']:.2f}",
                f"{run['completed_per_s']:.2f}",
                f"{ttft['p50']:,.0f}",
                f"{ttft['p95']:,.0f}{'' if kept else ' >'}",
                *(f"{itl[key]:,.0f}" if itl else "-" for key in ("p50", "p95")),
                f"{run['saturated']:.0%}",
            )
        rate = f"{arm['per_s']:.2f}" if arm["per_s"] else "none"
        best.add_row(
            name,
            f"{arm['alone']['ttft_ms']:,.0f}",
            rate if arm["past"] else f"{rate} at least",
            *(f"{arm[key]:.2f}x" if arm[key] else "-" for key in ("vs_full", "vs_prefix")),
        )
    config = results["config"]
    plain = sum(run["not_blended"] for arm in results["arms"].values() for run in arm["runs"])
    lengths = config["prompt_tokens"]
    for table in (runs, best):
        console.print(table, markup=False)
    if plain:
        console.print(f"Of the blended arm {plain:,} requests were prefilled instead.", markup=False)
    console.print(
        f"Sustained: the most answers a second while p95 of TTFT is {results['bound_ms']:,.0f} ms at most"
        " (> marks more). TTFT: from when a request was due. ITL: between the tokens of an answer."
        " queue: share of time in which requests waited for each other. alone: TTFT of requests one after"
        f" another. {config['questions']} questions in {config['phrasings']} phrasings, {config['chunks']}"
        f" chunks of {config['chunk_tokens']} tokens ({config['order']}) of {config['pool']}, prompts of"
        f" {min(lengths):,} to {max(lengths):,} tokens, answers of {config['max_tokens']};"
        f" {config['seconds']:g} s a rate; {config['ratio']:.0%} recomputed. {where(results['machine'])}.",
        markup=False,
    )
