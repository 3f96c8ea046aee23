"""Time to first token against one parameter, as a picture: a line and a band per arm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blendrag.lab.canvas import ARM_COLOURS, ARM_LABELS, add_legend, finish_axes, new_figure, save


def draw_sweep(results: Mapping[str, Any], path: Path) -> None:
    """Write the picture: TTFT to the left, full prefill / arm to the right; bands from p10 to p90."""
    points = results["points"]
    values = [point["value"] for point in points]
    numbers = not any(isinstance(value, str) for value in values)
    at = values if numbers else list(range(len(values)))
    figure = new_figure(9, 3.8)
    panels = figure.subplots(1, 2)
    for axes, number, scale in zip(panels, ("ttft_ms", "speedup_vs_full"), (1e-3, 1.0), strict=True):
        for arm, colour in ARM_COLOURS.items():
            if arm == "full" and number != "ttft_ms":
                continue
            low, middle, high = (
                [scale * point["arms"][arm][number][key] for point in points]
                for key in ("p10", "median", "p90")
            )
            axes.plot(at, middle, color=colour, marker="o", markersize=4, label=ARM_LABELS[arm])
            axes.fill_between(at, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.set_ylim(bottom=0)
        axes.set_xticks(at, _labels(values) if numbers else [str(value) for value in values])
    finish_axes(panels[0], "Time to first token", results["label"], "s (median, p10 to p90)")
    finish_axes(panels[1], "Full prefill / arm", results["label"], "times")
    add_legend(figure, panels[0])
    save(figure, path, results["machine"])


def _labels(values: Sequence[float]) -> list[str]:
    """A label per value; none where it would stand on the one before."""
    room = (max(values) - min(values)) / 15
    labels: list[str] = []
    last = -math.inf
    for value in values:
        labels.append(f"{value:g}" if value - last >= room else "")
        last = value if labels[-1] else last
    return labels
