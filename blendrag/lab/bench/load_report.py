"""What ``bench load`` and ``bench beside`` show: tables and pictures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from blendrag.lab import canvas
from blendrag.lab.canvas import ARM_COLOURS, ARM_LABELS, INK
from blendrag.lab.report import table_with, where

_ROOM = 2.5  # of the bound: what is above is out of the picture, being a queue that only grows
_KEYS = ("p50", "p95", "max")
_COLOURS = {**ARM_COLOURS, "alone": "#57a773", "slow": "#8f6fb8", "ingest": "#b8863b"}
_LABELS = {
    "alone": "nothing beside",
    "full": "full prefills beside",
    "blended": "blends beside",
    "slow": "blends from 20 MB/s",
    "ingest": "ingest beside",
}


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
        f" another. {config['questions']} prompts of {config['chunks']} chunks of {config['chunk_tokens']}"
        f" tokens, out of {config['pool']} chunks: {min(lengths):,} to {max(lengths):,} tokens, answers of"
        f" {config['max_tokens']};"
        f" {config['seconds']:g} s a rate; {config['ratio']:.0%} recomputed. {where(results['machine'])}.",
        markup=False,
    )


def draw_load(results: Mapping[str, Any], path: Path) -> None:
    """Write the picture: p50 to the left, p95 and its bound to the right."""
    figure = canvas.new_figure(9, 3.8)
    panels = figure.subplots(1, 2, sharey=True)
    bound = results["bound_ms"] / 1e3
    for axes, key, title in zip(panels, ("p50", "p95"), ("Median", "95th percentile"), strict=True):
        for name, arm in results["arms"].items():
            rates = [run["rate"] for run in arm["runs"]]
            waits = [run["ttft_ms"][key] / 1e3 for run in arm["runs"]]
            axes.plot(rates, waits, color=ARM_COLOURS[name], marker="o", markersize=4, label=ARM_LABELS[name])
        axes.set_ylim(0, _ROOM * bound)
        axes.set_xlim(left=0)
        canvas.finish_axes(axes, title, "requests a second", "time to first token, s")
    panels[1].axhline(bound, color=INK, linewidth=0.8, linestyle="--")
    panels[1].set_ylabel("")
    canvas.add_legend(figure, panels[0])
    canvas.save(figure, path, results["machine"])


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
        f"ITL: between two tokens of {config['decodes']} running answers, alone, beside full prefills, blends"
        " of the same prompts, blends from a disk of 20 MB/s, and ingest of their chunks. during: while an"
        " arrival waited for its first token, or to be stored."
        f" {config['repeats']} repeats of {config['arrivals']} arrivals each, one every"
        f" {results['gap']:.2f} s: {config['chunks']} chunks of {config['chunk_tokens']} tokens,"
        f" {config['ratio']:.0%} recomputed. {where(results['machine'])}.",
        markup=False,
    )


def draw_beside(results: Mapping[str, Any], path: Path) -> None:
    """Write the picture: a point per token, a panel per condition, of the last repeat."""
    traces = results["trace"]
    figure = canvas.new_figure(13, 3.4)
    panels = figure.subplots(1, len(traces), sharey=True)
    for axes, (name, trace) in zip(panels, traces.items(), strict=True):
        seconds, latencies = [at for at, _ in trace], [latency for _, latency in trace]
        axes.scatter(seconds, latencies, s=5, color=_COLOURS[name])
        axes.set_yscale("log")
        canvas.finish_axes(axes, _LABELS[name], "s", "ms from token to token" if axes is panels[0] else "")
    canvas.save(figure, path, results["machine"])
