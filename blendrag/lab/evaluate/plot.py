"""The results of an evaluation as a picture: three measures of what is lost against time to first token.

As Figures 12 and 16 of CacheBlend: further to the left is sooner, and nearer to full prefill's height is
better; each line is one selector over its ratios.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blendrag.lab import canvas
from blendrag.lab.canvas import INK
from blendrag.lab.evaluate.arms import FULL, REUSE
from blendrag.lab.evaluate.run import Evaluation
from blendrag.lab.evaluate.summary import ArmSummary

_MARKERS = "osD^vPX*<>hp"


def draw(results: Evaluation, path: Path) -> None:
    """Write the picture, without arms that have a budget of KV."""
    arms = {name: arm for name, arm in results.arms.items() if name not in results.decoding}
    figure = canvas.new_figure(14.1, 4.6)
    answer, first, words = figure.subplots(1, 3)
    for axes, measure in ((answer, "nll_loss"), (first, "kl_first_token"), (words, "f1")):
        _draw_arms(axes, arms, measure)
        axes.axhline(getattr(arms[FULL], measure).mean, color=INK, linewidth=0.8)
        axes.set_xlim(left=0)
    title = f"{results.config['format']}, {arms[FULL].n} questions"
    time = "time to first token, ms (median)"
    canvas.finish_axes(answer, title, time, "nats lost per token of the right answer")
    canvas.finish_axes(first, "", time, "KL of the first token, nats")
    canvas.finish_axes(words, "", time, "F1 of the answer")
    if REUSE in arms and arms[REUSE].gap == "clear":
        _add_gap_scale(answer, arms[REUSE].nll_loss.mean)
    canvas.add_legend(figure, answer)
    canvas.save(figure, path, results.machine)


def _draw_arms(axes: Any, arms: Mapping[str, ArmSummary], measure: str) -> None:
    for name in (FULL, REUSE):
        if name in arms:
            label, colour = canvas.ARM_LABELS[name], canvas.ARM_COLOURS[name]
            _draw_line(axes, [arms[name]], measure, label, color=colour, marker="*", markersize=11)
    for number, (label, line) in enumerate(_lines(arms).items()):
        marker = _MARKERS[number % len(_MARKERS)]
        _draw_line(axes, line, measure, label, color=f"C{number % 10}", marker=marker, markersize=5)


def _lines(arms: Mapping[str, ArmSummary]) -> dict[str, list[ArmSummary]]:
    """Return arms that differ in their ratio only, by ratio; "hkvd@0.15:int8" is on the line "hkvd:int8"."""
    lines: dict[str, dict[float, ArmSummary]] = defaultdict(dict)
    for name, arm in arms.items():
        if name not in (FULL, REUSE):
            base, *settings = name.split(":")
            selector, _, ratio = base.partition("@")
            lines[":".join((selector, *settings))][float(ratio or 0.0)] = arm
    return {label: [line[ratio] for ratio in sorted(line)] for label, line in lines.items()}


def _draw_line(axes: Any, line: list[ArmSummary], measure: str, label: str, **style: Any) -> None:
    times = [arm.ttft_ms.median for arm in line]
    losses = [getattr(arm, measure) for arm in line]
    means = [loss.mean for loss in losses]
    whiskers = [[loss.mean - loss.low for loss in losses], [loss.high - loss.mean for loss in losses]]
    axes.errorbar(times, means, yerr=whiskers, label=label, capsize=3, linewidth=1, **style)


def _add_gap_scale(axes: Any, reuse_loss: float) -> None:
    """Add a scale on the right: the same as the share of full reuse's loss that is repaired."""
    to_share, to_loss = (lambda loss: 1 - loss / reuse_loss), (lambda share: reuse_loss * (1 - share))
    scale = axes.secondary_yaxis("right", functions=(to_share, to_loss))
    scale.set_ylabel("share of full reuse's gap closed", color=INK, fontsize=9)
    scale.yaxis.set_major_formatter("{x:.0%}")
    scale.tick_params(length=0, colors=INK)
    scale.spines[:].set_visible(False)
