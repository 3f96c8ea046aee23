"""The speed-up over a stream of questions, as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_INK, _BLUE, _LINE = "#24292f", "#2f81c7", "#d1495b"


def draw_stream(results: Mapping[str, Any], path: Path) -> None:
    """Write the picture: a point per question asked both ways, a line per quarter's median."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    asked, config = results["questions"], results["config"]
    points = [
        (number, row["full_ms"] / row["ttft_ms"])
        for number, row in enumerate(asked, start=1)
        if row["full_ms"] is not None
    ]
    figure = Figure(figsize=(8, 3.2), dpi=160, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(facecolor="white")
    at, speed_up = zip(*points, strict=True)
    axes.scatter(at, speed_up, s=16, color=_BLUE, label="a question")
    size = len(asked) // len(results["quarters"])
    for number, quarter in enumerate(results["quarters"]):
        label = "" if number else "median of a quarter"
        axes.hlines(quarter["median"], number * size + 1, (number + 1) * size, color=_LINE, label=label)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("question", color=_INK, fontsize=9)
    axes.set_ylabel("full prefill / blending", color=_INK, fontsize=9)
    axes.tick_params(length=0, colors=_INK)
    axes.grid(color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.set_title(
        f"New questions over {config['more']} times more chunks than memory holds",
        loc="left", color=_INK, fontsize=11, fontweight="bold",
    )  # fmt: skip
    axes.legend(frameon=False, fontsize=9, labelcolor=_INK, loc="lower right")
    figure.savefig(path, facecolor="white", transparent=False)
