"""What budgets of KV lose, as a picture: by budget, and layer by layer (Ada-KV's figures 3 and 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blendrag.lab import canvas
from blendrag.lab.evaluate.decoding import DecodedSummary

_COLOURS = {"uniform": "#6e7781", "ada": "#2f81c7"}  # of the layers: the paper's pair


def draw_decoding(row: Sequence[Any], arms: Mapping[str, DecodedSummary]) -> None:
    """Into three axes: KL by budget; kept attention and loss by layer, with and without Ada."""
    divergence, kept, lost = row
    for by in dict.fromkeys(arm.by for arm in arms.values()):
        line = sorted((arm for arm in arms.values() if arm.by == by), key=lambda arm: arm.budget)
        means = [arm.kl.mean for arm in line]
        whiskers = [[arm.kl.mean - arm.kl.low for arm in line], [arm.kl.high - arm.kl.mean for arm in line]]
        budgets = [arm.budget for arm in line]
        divergence.errorbar(budgets, means, whiskers, marker="o", markersize=4, capsize=3, label=by)
    divergence.set_xscale("log", base=2)
    divergence.set_yscale("log")
    divergence.xaxis.set_major_formatter("{x:.0f}")
    budgets = sorted({arm.budget for arm in arms.values() if arm.by in _COLOURS})
    for arm in arms.values():
        if arm.by in _COLOURS and arm.layers_kept:
            faint = 1 - 0.7 * budgets.index(arm.budget) / max(1, len(budgets) - 1)
            style = {"color": _COLOURS[arm.by], "alpha": faint, "label": f"{arm.by} {arm.budget}"}
            kept.plot(arm.layers_kept, **style)
            lost.plot(arm.layers_lost, **style)
    canvas.finish_axes(divergence, "decoded from a budget", "tokens of KV a head keeps", "KL, nats a token")
    canvas.finish_axes(kept, "", "layer", "attention that is kept")
    canvas.finish_axes(lost, "", "layer", "L1 loss of attention's output, relative")
    divergence.legend(frameon=False, fontsize=8, labelcolor=canvas.INK)
    kept.legend(frameon=False, fontsize=7, labelcolor=canvas.INK, ncols=2)
