"""The tables of ``bench eviction``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from blendrag.bench.report import table_with


def print_eviction(results: Mapping[str, Any], console: Console) -> None:
    """Hit ratios by size, then what each policy costs and saves."""
    sizes, hits, config = results["sizes"], results["policies"], results["config"]
    ratios = table_with("token hit ratio", *(f"{size:,}" for size in sizes))
    for name, values in hits.items():
        ratios.add_row(name, *(f"{value:.4f}" for value in values))
    moved = table_with("policy", "size", "low", "high", "GB in", "GB out", "TTFT ms", "saved", "closed")
    for place, size in enumerate(sizes):
        for name in hits:
            share = [results.get(key, {}).get(name, {}) for key in ("saved", "closed")]
            moved.add_row(
                name,
                f"{size:,}",
                *(f"{hit:.3f}" for hit in results["spread"][name][place]),
                *(_number(results[key][name][place]) for key in ("written_gb", "read_gb", "ttft_ms")),
                *(_percent(values[place]) if values else "" for values in share),
            )
        moved.add_section()
    for part in (ratios, moved):
        console.print(part, markup=False)
    times = "one trace" if config["traces"] == 1 else f"means of {config['traces']} traces"
    lines = (
        f"{config['trace']}: {config['requests']:,} requests, sizes in {config['unit']}; {times}.",
        "low, high: hit ratio, among traces. GB: of KV, written and read. TTFT: estimated, mean. saved: of"
        " the cache, for LRU's hit ratio. closed: of the gap from LRU to the optimum.",
        *results["notes"],
    )
    for line in lines:
        console.print(line, markup=False)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
