"""Hit ratio against size, and over time, as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blendrag.bench.canvas import INK, add_legend, finish_axes, new_figure, save

_COLOURS = {
    "lru": "#6e7781", "lfu": "#b08d57", "gdsf": "#e9a23b", "pgdsf": "#c4553b", "lpc": "#8e6cc0",
    "lpc+": "#2f81c7", "oracle": "#3f9c6d", "optimal": INK,
}  # fmt: skip
_BOUNDS = ("oracle", "optimal")  # no policies: dashed


def draw_eviction(results: Mapping[str, Any], path: Path) -> None:
    """Write the picture: to the left all sizes, to the right the middle one over time."""
    sizes, config = results["sizes"], results["config"]
    middle = len(sizes) // 2
    figure = new_figure(9, 3.8)
    left, right = figure.subplots(1, 2)
    for name, hits in results["policies"].items():
        style = {"color": _COLOURS.get(name), "linestyle": "--" if name in _BOUNDS else "-", "label": name}
        left.plot(sizes, hits, marker="o", markersize=3, **style)
        low, high = zip(*results["spread"][name], strict=True)
        left.fill_between(sizes, low, high, color=style["color"], alpha=0.15, linewidth=0)
        windows = [float("nan") if hit is None else hit for hit in results["windows"][name][middle]]
        right.plot(range(1, len(windows) + 1), windows, **style)
    if len(sizes) > 1:
        left.set_xscale("log")
        left.set_xticks(sizes, [f"{size:,}" for size in sizes])
        left.set_xticks([], minor=True)
    for axes in (left, right):
        axes.set_ylim(bottom=0)
    finish_axes(left, config["trace"], f"cache, {config['unit']}", "token hit ratio")
    finish_axes(right, f"{sizes[middle]:,} {config['unit']}", "window of time", "token hit ratio")
    add_legend(figure, left)
    save(figure, path)
