"""The look of the pictures: opaque white, so that they are as readable on a dark page; quiet axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blendrag.errors import ConfigError, needs
from blendrag.lab.results import where
from blendrag.machine import Machine

INK = "#24292f"
_GRID = "#e6e8eb"
SUFFIXES = (".png", ".svg", ".pdf")
ARM_COLOURS = {"full": "#6e7781", "prefix": "#8e6cc0", "reuse": "#e9a23b", "blended": "#2f81c7"}
ARM_LABELS = {"full": "full prefill", "prefix": "prefix caching", "reuse": "full reuse", "blended": "blended"}


def check_plot_path(path: Path) -> None:
    """Raise ConfigError unless a picture can be written there, and MissingDependencyError if there is nothing
    to draw it with: better before measuring than after."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot {path}: the name must end in {', '.join(SUFFIXES)}")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}")
    with needs("blendrag[lab]"):
        import matplotlib  # noqa: F401


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of this size in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=160, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def finish_axes(axes: Any, title: str, x: str, y: str) -> None:
    """Set title, labels and grid."""
    axes.set_facecolor("white")
    axes.set_title(title, loc="left", color=INK, fontsize=11, fontweight="bold")
    axes.set_xlabel(x, color=INK, fontsize=9)
    axes.set_ylabel(y, color=INK, fontsize=9)
    axes.tick_params(which="both", length=0, colors=INK)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)


def add_legend(figure: Any, axes: Any) -> None:
    """Add a legend above, of what ``axes`` show: below is where :func:`save` says what was measured on."""
    columns = int(figure.get_figwidth() / 1.75)
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside upper center", ncols=columns, labelcolor=INK,
        frameon=False, fontsize=9,
    )  # fmt: skip


def save(figure: Any, path: Path, machine: Machine) -> None:
    """Write the picture; what it was measured on stands below."""
    figure.supxlabel(where(machine), color=INK, fontsize=8)
    figure.savefig(path, facecolor="white", transparent=False)
