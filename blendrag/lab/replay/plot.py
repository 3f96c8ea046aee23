"""Hit ratio against size, and over time, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blendrag.lab.canvas import INK, add_legend, finish_axes, new_figure, save
from blendrag.lab.replay.against import BOUNDS

_COLOURS = {
    "lru": "#6e7781", "lfu": "#b08d57", "gdsf": "#e9a23b", "pgdsf": "#c4553b", "lpc": "#8e6cc0",
    "lpc+": "#2f81c7", "oracle": "#3f9c6d", "static": "#3f9c6d", "optimal": INK,
}  # fmt: skip
_APART = 1.6  # sizes closer than this factor share a label


def draw_eviction(results: Mapping[str, Any], path: Path) -> None:
    """Write the picture: to the left all sizes, to the right the middle one over time."""
    sizes, config = results["sizes"], results["config"]
    middle = len(sizes) // 2
    figure = new_figure(9, 3.8)
    left, right = figure.subplots(1, 2)
    _draw_sizes(left, results, config["trace"])
    for name in results["policies"]:
        windows = [float("nan") if hit is None else hit for hit in results["windows"][name][middle]]
        right.plot(range(1, len(windows) + 1), windows, **_style(name))
    right.set_ylim(bottom=0)
    finish_axes(right, f"{sizes[middle]:,} {config['unit']}", "window of time", "token hit ratio")
    add_legend(figure, left)
    save(figure, path)


def draw_side_by_side(titled: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Write a picture of several replays, by title: hit ratio against size. The first has all policies."""
    figure = new_figure(4.6 * len(titled), 3.8)
    panels = figure.subplots(1, len(titled), squeeze=False)[0]
    for axes, (title, results) in zip(panels, titled.items(), strict=True):
        _draw_sizes(axes, results, title)
    add_legend(figure, panels[0])
    save(figure, path)


def _draw_sizes(axes: Any, results: Mapping[str, Any], title: str) -> None:
    sizes = results["sizes"]
    for name, hits in results["policies"].items():
        style = _style(name)
        axes.plot(sizes, hits, marker="o", markersize=3, **style)
        low, high = zip(*results["spread"][name], strict=True)
        axes.fill_between(sizes, low, high, color=style["color"], alpha=0.15, linewidth=0)
    if len(sizes) > 1:
        axes.set_xscale("log")
        shown = _labelled(sizes)
        axes.set_xticks(shown, [f"{size:,}" for size in shown])
        axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    finish_axes(axes, title, f"cache, {results['config']['unit']}", "token hit ratio")


def _style(name: str) -> dict[str, Any]:
    return {"color": _COLOURS.get(name), "linestyle": "--" if name in BOUNDS else "-", "label": name}


def _labelled(sizes: Sequence[int]) -> list[int]:
    """Those whose labels do not run into each other."""
    shown = [sizes[0]]
    for size in sizes:
        if size >= _APART * shown[-1]:
            shown.append(size)
    return shown
