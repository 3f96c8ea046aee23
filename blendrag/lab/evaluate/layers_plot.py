"""Deviation by layer, its rank correlation, and attention by ratio: CacheBlend's figures 7, 8 and 6."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blendrag.lab import canvas
from blendrag.lab.canvas import INK

_COLOURS = {"hkvd": "#2f81c7", "hkvd_each": "#9ecae1", "first_k": "#e9a23b", "random": "#a8b0b8"}
_METRIC_COLOURS = {"v": "#2f81c7", "k": "#d1495b"}
_LAYERS = 5  # lines of the first picture
_LEAST = 1e-6  # on a logarithmic axis


def draw_layers(results: Mapping[str, Any], path: Path) -> None:
    """Write the three figures side by side; bands: 10th to 90th percentile over prompts."""
    figure = canvas.new_figure(12, 3.8)
    distribution, ranks, attention = figure.subplots(1, 3)
    _distribution(distribution, results["deviation"]["v"])
    _ranks(ranks, results["spearman"])
    _attention(attention, results["attention"])
    for axes in (distribution, ranks, attention):
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    figure.suptitle(f"{len(results['config']['prompt_tokens'])} prompts", color=INK, fontsize=9)
    canvas.save(figure, path, results["machine"])


def _distribution(axes: Any, layers: Sequence[Mapping[str, Any]]) -> None:
    step = max(1, (len(layers) - 1) // (_LAYERS - 1))
    for number, row in enumerate(layers[::step]):
        shares = [100 * float(q) for q in row["quantiles"]]
        values = [max(_LEAST, value["mean"]) for value in row["quantiles"].values()]
        shade = 0.25 + 0.75 * number / _LAYERS
        axes.plot(shares, values, color=_METRIC_COLOURS["v"], alpha=shade, label=f"layer {row['layer']}")
    axes.set_yscale("log")
    canvas.finish_axes(axes, "KV deviation of tokens", "% of the cached tokens", "V deviation by mean norm")


def _ranks(axes: Any, ranks: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    for metric, pairs in ranks.items():
        _band(axes, [pair["layer"] for pair in pairs], pairs, _METRIC_COLOURS[metric], metric.upper())
    axes.set_ylim(top=1.0)
    canvas.finish_axes(axes, "Do the same tokens deviate?", "layer", "Spearman with the next layer")


def _attention(axes: Any, curves: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    for name, curve in curves.items():
        _band(axes, [100 * float(ratio) for ratio in curve], list(curve.values()), _COLOURS[name], name)
    axes.set_ylim(bottom=0)
    canvas.finish_axes(axes, "Attention of the last tokens", "% recomputed", "distance from full prefill's")


def _band(axes: Any, at: list[float], spreads: Sequence[Mapping[str, float]], colour: str, name: str) -> None:
    axes.plot(at, [spread["mean"] for spread in spreads], color=colour, label=name, linewidth=1.8)
    low, high = ([spread[edge] for spread in spreads] for edge in ("p10", "p90"))
    axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
