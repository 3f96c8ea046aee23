"""Forecasts against what happened: of the predictor, and of turns alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blendrag.lab import canvas
from blendrag.lab.canvas import INK

_SHOWN = {"lpc": ("LPC", "#2f81c7"), "turns_only": ("turns only", "#e9a23b")}


def draw_calibration(results: Mapping[str, Any], path: Path) -> None:
    """results: as ``evaluate_on_file`` gives them. The nearer to the diagonal, the better; the area of a
    point grows with how often the forecast was made."""
    figure = canvas.new_figure(5.2, 4.8)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="#a8b0b8", linewidth=1, linestyle="--")
    for name, (label, colour) in _SHOWN.items():
        quality = results[name]
        points = quality["calibration"]
        forecast, happened = ([point[key] for point in points] for key in ("forecast", "happened"))
        sizes = [20 + 380 * point["count"] / results["examples"] for point in points]
        shown = f"{label}: AUC {quality['auc']:.2f}, off by {quality['calibration_error']:.3f}"
        axes.plot(forecast, happened, color=colour, linewidth=1.5, label=shown)
        axes.scatter(forecast, happened, s=sizes, color=colour, alpha=0.6, linewidth=0)
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="upper left")
    canvas.finish_axes(axes, "Does the conversation go on?", "forecast", "share that went on")
    canvas.save(figure, path)
