"""Time to first token against the rate of requests, as a picture: where each arm saturates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blendrag.lab import canvas
from blendrag.lab.canvas import ARM_COLOURS, ARM_LABELS, INK

_ROOM = 2.5  # of the bound: what is above is out of the picture, being a queue that only grows


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
