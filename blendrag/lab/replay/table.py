"""The tables of ``bench eviction``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from blendrag.lab.replay.summary import WINDOWS
from blendrag.lab.report import table_with

Values = Mapping[str, Sequence[float | None]]


def print_eviction(results: Mapping[str, Any], console: Console) -> None:
    """Hit ratios by size, what they mean against LRU and the bounds, then what each policy moves."""
    sizes, config = results["sizes"], results["config"]
    _print_by_size("token hit ratio", sizes, results["policies"], "{:.4f}".format, console)
    if "saved" in results:
        _print_by_size("cache saved, for LRU's hit ratio", sizes, results["saved"], "{:.1%}".format, console)
        title = "closed, of LRU's gap to the optimum"
        _print_by_size(title, sizes, results["closed"], "{:.0%}".format, console)
    if any(any(of) for of in results["slump"].values()):
        title = f"windows in a row, of {WINDOWS}, more than 3 % below LRU"
        _print_by_size(title, sizes, results["slump"], "{:.0f}".format, console)
    for bound, values in results["behind"].items():
        if values:
            _print_by_size(f"hit ratio behind the {bound}", sizes, values, "{:.4f}".format, console)
    _print_moved(results, console)
    times = "one trace" if config["traces"] == 1 else f"means of {config['traces']} traces"
    lines = (
        f"{config['trace']}: {config['requests']:,} requests, sizes in {config['unit']}; {times}.",
        "low, high: hit ratio, among traces. GB: of KV, written and read. TTFT: estimated, mean.",
        *results["notes"],
    )
    for line in lines:
        console.print(line, markup=False)


def _print_by_size(
    title: str, sizes: Sequence[int], values: Values, shown: Callable[[float], str], console: Console
) -> None:
    """A row per size; a dash where the replays do not tell."""
    table = table_with("size", *values)
    table.title, table.title_justify = title, "left"
    for place, size in enumerate(sizes):
        row = [of[place] for of in values.values()]
        table.add_row(f"{size:,}", *("–" if value is None else shown(value) for value in row))
    console.print(table, markup=False)


def _print_moved(results: Mapping[str, Any], console: Console) -> None:
    table = table_with("policy", "size", "low", "high", "GB in", "GB out", "TTFT ms")
    for place, size in enumerate(results["sizes"]):
        for name in results["policies"]:
            table.add_row(
                name,
                f"{size:,}",
                *(f"{hit:.3f}" for hit in results["spread"][name][place]),
                *(_number(results[key][name][place]) for key in ("written_gb", "read_gb", "ttft_ms")),
            )
        table.add_section()
    console.print(table, markup=False)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
