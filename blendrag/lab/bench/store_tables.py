"""The tables of ``bench tiers`` and ``bench stream``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from blendrag.lab.report import table_with


def print_tiers(results: Mapping[str, Any], console: Console) -> None:
    """A row per tier; what was asked of them, as ratios; how fast files are read."""
    table = table_with("KV is", "TTFT ms", "p10-p90", "speed-up", "load ms", "recompute ms")
    for name, arm in results["arms"].items():
        ttft, split = arm["ttft_ms"], arm["split_ms"]
        table.add_row(
            {"full": "not used: full prefill", "miss": "missing"}.get(name, name),
            f"{ttft['median']:,.0f}",
            f"{ttft['p10']:,.0f}-{ttft['p90']:,.0f}",
            f"{arm['speedup_vs_full']['median']:.2f}x",
            f"{split['load']:,.0f}" if name not in ("full", "miss") else "",
            f"{split['recompute']:,.0f}" if name != "full" else "",
        )
    ratios = table_with("ratio, repeat by repeat", "median", "p10-p90")
    for name, ratio in results["ratios"].items():
        ratios.add_row(name, f"{ratio['median']:.3f}", f"{ratio['p10']:.3f}-{ratio['p90']:.3f}")
    reading = table_with("reading cold files", "MB/s", "p10-p90")
    for name in ("raw", "store"):
        speed = {key: value / 1e6 for key, value in results["reading"][name].items()}
        reading.add_row(name, f"{speed['median']:,.0f}", f"{speed['p10']:,.0f}-{speed['p90']:,.0f}")
    share = results["reading"]["store / raw"]
    reading.add_row("store / raw", f"{share['median']:.2f}", f"{share['p10']:.2f}-{share['p90']:.2f}")
    config, machine = results["config"], results["machine"]
    for part in (table, ratios, reading):
        console.print(part, markup=False)
    console.print(
        "load: waiting for stored KV, moving it to its place and writing it."
        f" {config['repeats']} repeats, {config['chunks']} chunks of {config['chunk_tokens']} tokens,"
        f" {config['ratio']:.0%} recomputed, codec {config['codec']};"
        f" {machine['model']} on {machine['cpu']}, {machine['threads']} threads.",
        markup=False,
    )


def print_stream(results: Mapping[str, Any], console: Console) -> None:
    """A row per quarter of the stream."""
    table = table_with("quarter", "speed-up", "p10-p90")
    for number, quarter in enumerate(results["quarters"], start=1):
        spread = f"{quarter['p10']:.2f}-{quarter['p90']:.2f}"
        table.add_row(str(number), f"{quarter['median']:.2f}x", spread)
    console.print(table, markup=False)
    config, stored = results["config"], results["stored"]
    ram, disk = results["tiers"]["ram"], results["tiers"]["disk"]
    asked = ram["hits"] + ram["misses"]
    console.print(
        f"Last quarter / first: {results['decay']:.2f}. {len(results['questions'])} questions over"
        f" {config['pool']} chunks of {config['chunk_tokens']} tokens, {config['more']} times what memory"
        f" holds; {ram['hits']:,} of {asked:,} from RAM, {disk['hits']:,} from disk. Chunks stored before:"
        f" {stored['before']:,}, after: {stored['after']:,}.",
        markup=False,
    )
