"""Loading and computing side by side, a pair of lanes per tier: the overlap as a picture (CacheBlend figure
10)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_INK = "#24292f"
_COLOURS = {"load": "#e9a23b", "compute": "#2f81c7", "wait": "#d1495b"}


def draw_timeline(traces: Mapping[str, Sequence[Sequence[Any]]], path: Path, title: str) -> None:
    """Write the picture. traces: per tier events (lane, name, begin, end), as ``load.trace`` has them.

    A bar is a layer: of the loader's thread above, of the fused prefill below; red is the prefill waiting.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(9, 1.2 + 0.9 * len(traces)), dpi=160, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(facecolor="white")
    for row, events in enumerate(traces.values()):
        zero = min((begin for _, _, begin, _ in events), default=0.0)
        for lane, _, begin, end in events:
            if lane in _COLOURS:
                at = row + (-0.2 if lane == "load" else 0.2)
                axes.barh(
                    at, 1e3 * (end - begin), left=1e3 * (begin - zero), height=0.34, color=_COLOURS[lane],
                    edgecolor="white", linewidth=0.4, zorder=3 if lane == "wait" else 2,
                )  # fmt: skip
    axes.set_yticks(range(len(traces)), list(traces), color=_INK)
    axes.invert_yaxis()
    axes.set_xlabel("ms from the prompt's arrival in the worker", color=_INK, fontsize=9)
    axes.tick_params(length=0, colors=_INK)
    axes.grid(axis="x", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.set_title(title, loc="left", color=_INK, fontsize=11, fontweight="bold")
    figure.legend(
        handles=[Patch(color=colour, label=lane) for lane, colour in _COLOURS.items()],
        loc="outside lower center", ncols=3, labelcolor=_INK, frameon=False, fontsize=9,
    )  # fmt: skip
    figure.savefig(path, facecolor="white", transparent=False)
