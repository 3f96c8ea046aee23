"""From deviations per layer and token to the numbers of CacheBlend's figures 6 to 8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

METRICS = ("v", "k")
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.85, 0.9, 0.95, 0.99)
THRESHOLDS = (0.01, 0.03, 0.1, 0.3, 1.0)
TOP = 0.15  # the paper's default ratio

Array = np.ndarray[Any, np.dtype[np.float64]]
Floats = Sequence[float] | Array


def spearman(one: Floats, other: Floats) -> float:
    """Rank correlation of two lists of equal length; ties have their mean rank. 0 where one is constant."""
    a, b = (_ranks(values) - (len(values) + 1) / 2 for values in (one, other))
    norm = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / norm if norm else 0.0


def _ranks(values: Floats) -> Array:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Array = (np.cumsum(count) - (count - 1) / 2)[place]
    return ranks


def top_share(values: Floats, top: float = TOP) -> float:
    """Share of the sum that the largest ``top`` of the values hold; ``top`` of it if all are 0."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))[::-1]
    total = float(ordered.sum())
    return float(ordered[: max(1, round(top * ordered.size))].sum()) / total if total else top


def summarise_probes(probes: Sequence[Mapping[str, Any]], ratios: Sequence[float]) -> dict[str, Any]:
    """The means over prompts, each as ``{"mean", "p10", "p90"}`` (percentiles over prompts).

    probes: a prompt each, as ``engine.layer_probe`` gives them; layers from 0.

    layer0: largest deviation of layer 0, whose K and V depend on the token alone: 0 but for rounding.
    deviation (Figure 7): per metric and layer from 1 ``mean``, ``quantiles``, ``above`` (share of tokens
        above a threshold) and ``top_share`` (of the squared deviation that the top 15 % of the tokens hold).
        Deviation is squared L2, in units of the layer's mean squared norm.
    spearman (Figure 8): per metric, of layers 1 and 2, 2 and 3, ...: rank correlation over tokens.
    attention (Figure 6): per curve and ratio, the mean over layers from 1 of the forward attention deviation,
        relative to the norm of full prefill's attention matrix.
    """
    by_metric = {metric: [probe["deviation"][metric] for probe in probes] for metric in METRICS}
    return {
        "layer0": max(max(prompt[0]) for prompts in by_metric.values() for prompt in prompts),
        "deviation": {metric: _deviation(prompts) for metric, prompts in by_metric.items()},
        "spearman": {metric: _neighbours(prompts) for metric, prompts in by_metric.items()},
        "attention": {
            curve: {
                f"{ratio:g}": _spread([float(np.mean(probe["attention"][curve][at])) for probe in probes])
                for at, ratio in enumerate(ratios)
            }
            for curve in probes[0]["attention"]
        },
    }


def _deviation(prompts: Sequence[Sequence[Floats]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for layer in range(1, len(prompts[0])):
        own = [np.asarray(prompt[layer]) for prompt in prompts]
        quantiles = np.array([np.quantile(one, QUANTILES) for one in own])
        above = np.array([[np.mean(one > threshold) for threshold in THRESHOLDS] for one in own])
        rows.append(
            {
                "layer": layer,
                "mean": _spread([float(one.mean()) for one in own]),
                "quantiles": {f"{q:g}": _spread(quantiles[:, at]) for at, q in enumerate(QUANTILES)},
                "above": {f"{threshold:g}": _spread(above[:, at]) for at, threshold in enumerate(THRESHOLDS)},
                "top_share": _spread([top_share(one) for one in own]),
            }
        )
    return rows


def _neighbours(prompts: Sequence[Sequence[Floats]]) -> list[dict[str, float]]:
    return [
        {"layer": layer} | _spread([spearman(prompt[layer], prompt[layer + 1]) for prompt in prompts])
        for layer in range(1, len(prompts[0]) - 1)
    ]


def _spread(values: Floats) -> dict[str, float]:
    low, high = np.percentile(values, (10, 90))
    return {"mean": float(np.mean(values)), "p10": float(low), "p90": float(high)}
