"""The results as a picture: a bar per arm, for blended ones split into where the time goes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blendrag.errors import ConfigError
from blendrag.lab.report import was_blended
from blendrag.lab.statistics import PARTS

SUFFIXES = (".png", ".svg", ".pdf")
_INK = "#24292f"
_COLOURS = {"load": "#e9a23b", "select": "#8e6cc0", "recompute": "#2f81c7", "engine": "#9ecae1"}
_PLAIN = "#a8b0b8"


def check_plot_path(path: Path) -> None:
    """Raise ConfigError unless a picture can be written there: better before measuring than after."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot {path}: the name must end in {', '.join(SUFFIXES)}")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}")


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Write the picture. Its white background is opaque: it is as readable on a dark page."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    arms, config, machine = results["arms"], results["config"], results["machine"]
    names = list(arms)
    figure = Figure(figsize=(8, 1.7 + 0.48 * len(names)), dpi=160, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(facecolor="white")
    for row, name in enumerate(names):
        _bar(axes, row, arms[name])
    axes.set_yticks(range(len(names)), [_label(name) for name in names], color=_INK)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.16 * max(arm["ttft_ms"]["p90"] for arm in arms.values()))
    axes.set_xlabel(
        "time to first token, ms (median; whiskers: p10 to p90)\n"
        f"{machine['cpu']}, {machine['threads']} threads",
        color=_INK, fontsize=9,
    )  # fmt: skip
    axes.tick_params(length=0, colors=_INK)
    axes.grid(axis="x", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.set_title(
        f"{config['chunks']} chunks of {config['chunk_tokens']} tokens, {_model_name(machine['model'])}",
        loc="left", color=_INK, fontsize=11, fontweight="bold",
    )  # fmt: skip
    handles = [Patch(color=_COLOURS[part], label=part) for part in (*PARTS, "engine")]
    figure.legend(
        handles=[Patch(color=_PLAIN, label="plain prefill"), *handles], loc="outside lower center",
        ncols=len(handles) + 1, labelcolor=_INK, frameon=False, fontsize=9,
    )  # fmt: skip
    figure.savefig(path, facecolor="white", transparent=False)


def _bar(axes: Any, row: int, arm: Mapping[str, Any]) -> None:
    ttft, split = arm["ttft_ms"], arm["split_ms"]
    if was_blended(arm):
        left = 0.0
        for part in (*PARTS, "engine"):
            axes.barh(row, split[part], left=left, height=0.62, color=_COLOURS[part])
            left += split[part]
    else:
        axes.barh(row, ttft["median"], height=0.62, color=_PLAIN)
    whiskers = [[ttft["median"] - ttft["p10"]], [ttft["p90"] - ttft["median"]]]
    axes.errorbar(ttft["median"], row, xerr=whiskers, color=_INK, capsize=3, linewidth=1)
    axes.annotate(
        f"{arm['speedup_vs_full']['median']:.1f}×", (max(ttft["p90"], ttft["median"]), row), (6, 0),
        textcoords="offset points", va="center", color=_INK, fontsize=10, fontweight="bold",
    )  # fmt: skip


def _label(name: str) -> str:
    kind, _, ratio = name.partition("@")
    if ratio:
        return f"{kind} {float(ratio):.0%}" if float(ratio) * 100 % 1 == 0 else f"{kind} {float(ratio):.1%}"
    return {"full": "full prefill", "prefix": "prefix caching", "reuse": "full reuse"}.get(name, name)


def _model_name(model: str) -> str:
    return Path(model).name
