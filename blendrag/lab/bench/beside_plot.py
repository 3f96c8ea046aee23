"""Inter-token latency over time beside arriving prompts, as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blendrag.lab import canvas

_COLOURS = {**canvas.ARM_COLOURS, "alone": "#57a773"}
_LABELS = {"alone": "nothing beside", "full": "full prefills beside", "blended": "blends beside"}


def draw_beside(results: Mapping[str, Any], path: Path) -> None:
    """Write the picture: a point per token, a panel per condition, of the last repeat."""
    traces = results["trace"]
    figure = canvas.new_figure(9, 3.4)
    panels = figure.subplots(1, len(traces), sharey=True)
    for axes, (name, trace) in zip(panels, traces.items(), strict=True):
        seconds, latencies = [at for at, _ in trace], [latency for _, latency in trace]
        axes.scatter(seconds, latencies, s=5, color=_COLOURS[name])
        axes.set_yscale("log")
        canvas.finish_axes(axes, _LABELS[name], "s", "ms from token to token" if axes is panels[0] else "")
    canvas.save(figure, path, results["machine"])
