"""The tables and the picture of ``bench eviction``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from blendrag.lab.eviction.compare import BOUNDS, EvictionResults
from blendrag.tables import table_with

Values = Mapping[str, Sequence[float | None]]

_APART = 1.6  # sizes closer than this factor share a label


def print_eviction(results: EvictionResults, console: Console) -> None:
    """Hit ratios by size, and what they mean against LRU and the optimum."""
    sizes = results.sizes
    _print_by_size("token hit ratio", sizes, results.policies, "{:.4f}".format, console)
    if results.saved:
        _print_by_size("cache saved, for LRU's hit ratio", sizes, results.saved, "{:.1%}".format, console)
        title = "closed, of LRU's gap to the optimum"
        _print_by_size(title, sizes, results.closed, "{:.0%}".format, console)
    title = "hit ratio of the last quarter, of the first's"
    _print_by_size(title, sizes, results.kept_up, "{:.2f}".format, console)
    times = "one trace" if results.traces == 1 else f"means of {results.traces} traces"
    requests = f"{results.trace}: {results.requests:,} requests, sizes in {results.unit}; {times}."
    for line in (requests, *results.notes):
        console.print(line, markup=False)


def _print_by_size(
    title: str, sizes: Sequence[int], values: Values, shown: Callable[[float], str], console: Console
) -> None:
    """A row per size; a dash where the replays do not tell."""
    table = table_with("size", *values, title=title)
    for place, size in enumerate(sizes):
        row = [of[place] for of in values.values()]
        table.add_row(f"{size:,}", *("–" if value is None else shown(value) for value in row))
    console.print(table, markup=False)


def draw_eviction(results: EvictionResults, path: Path) -> None:
    """Write a picture: hit ratios against size, and between which values they lie."""
    from blendrag.lab.canvas import add_legend, finish_axes, new_figure, save

    sizes = results.sizes
    figure = new_figure(5.2, 3.8)
    axes = figure.subplots()
    for name, hits in results.policies.items():
        style = "--" if name in BOUNDS else "-"
        (line,) = axes.plot(sizes, hits, marker="o", markersize=3, linestyle=style, label=name)
        low, high = zip(*results.spread[name], strict=True)
        axes.fill_between(sizes, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    if len(sizes) > 1:
        axes.set_xscale("log")
        shown = _labelled(sizes)
        axes.set_xticks(shown, [f"{size:,}" for size in shown])
        axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    finish_axes(axes, results.trace, f"cache, {results.unit}", "token hit ratio")
    add_legend(figure, axes)
    save(figure, path)


def _labelled(sizes: Sequence[int]) -> list[int]:
    """Those whose labels do not run into each other."""
    shown = [sizes[0]]
    for size in sizes:
        if size >= _APART * shown[-1]:
            shown.append(size)
    return shown
