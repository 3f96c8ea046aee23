"""The results of an evaluation for people: tables, the recommendation, and a picture.

In the picture, as in Figures 12 and 16 of CacheBlend, further to the left is sooner, and nearer to full
prefill's height is better; each line is one selector over its ratios.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from blendrag.lab import canvas
from blendrag.lab.bootstrap import Interval
from blendrag.lab.canvas import INK
from blendrag.lab.evaluate.arms import FULL, REUSE
from blendrag.lab.evaluate.decoding import DECODING_LEGEND, DecodedSummary, decoding_table, shown, shown_range
from blendrag.lab.evaluate.recommend import Recommendation
from blendrag.lab.evaluate.summary import ArmSummary
from blendrag.lab.results import Results, where
from blendrag.machine import Machine
from blendrag.tables import table_with


@dataclass(frozen=True, slots=True)
class Evaluation(Results):
    """The results, as JSON has them. config: the options, how many questions
    (``rows``), and those left out because their prompts do not fit the model's window (``too_long``).
    decoding: of the arms with a budget of KV."""

    arms: dict[str, ArmSummary]
    recommendation: Recommendation
    machine: Machine
    config: dict[str, Any]
    decoding: dict[str, DecodedSummary] = field(default_factory=dict)

    def parts(self) -> Iterator[Table | str]:
        """Yield what each arm loses, how far it agrees with full prefill, what it is worth; what a budget of
        KV loses; what is recommended."""
        likelihood = table_with("arm", "NLL", "lost", "95 %", "gap closed", "95 %")
        agreement = table_with("arm", "KL", "KL answer", "top-1", "F1/full", "exact", "decision")
        usefulness = table_with("arm", "F1", "recomputed", "TTFT ms", "speed-up")
        for name, arm in self.arms.items():
            lost = f"{_noise(arm.nll_loss)}{arm.nll_loss.mean:+z.2f}", shown_range(arm.nll_loss, "z.2f")
            likelihood.add_row(name, f"{arm.nll_gold.mean:.2f}", *lost, *shown(arm.gap_closed, "z.0%"))
            kl = (f"{each.mean:.3f}" for each in (arm.kl_first_token, arm.kl_answer))
            shares = (arm.top1_agreement, arm.f1_vs_full, arm.exact_text, arm.decision_agreement)
            agreement.add_row(name, *kl, *(_share(each) for each in shares))
            f1 = f"{_noise(arm.f1_loss)}{arm.f1.mean:.2f}"
            times = f"{arm.ttft_ms.median:,.0f}", f"{arm.speedup.mean:.1f}x"
            usefulness.add_row(name, f1, _share(arm.recomputed), *times)
        yield from (likelihood, agreement, usefulness, _LEGEND)
        if self.decoding:
            yield from (decoding_table(self.decoding), DECODING_LEGEND)
        yield from (_facts(self), self.recommendation.why)

    def draw(self, path: Path) -> None:
        """Write the picture, without arms that have a budget of KV."""
        arms = {name: arm for name, arm in self.arms.items() if name not in self.decoding}
        figure = canvas.new_figure(14.1, 4.6)
        answer, first, words = figure.subplots(1, 3)
        for axes, measure in ((answer, "nll_loss"), (first, "kl_first_token"), (words, "f1")):
            _draw_arms(axes, arms, measure)
            axes.axhline(getattr(arms[FULL], measure).mean, color=INK, linewidth=0.8)
            axes.set_xlim(left=0)
        title = f"{self.config['format']}, {arms[FULL].n} questions"
        time = "time to first token, ms (median)"
        canvas.finish_axes(answer, title, time, "nats lost per token of the right answer")
        canvas.finish_axes(first, "", time, "KL of the first token, nats")
        canvas.finish_axes(words, "", time, "F1 of the answer")
        if REUSE in arms and arms[REUSE].gap == "clear":
            _add_gap_scale(answer, arms[REUSE].nll_loss.mean)
        canvas.add_legend(figure, answer)
        canvas.save(figure, path, self.machine)


_LEGEND = (
    "NLL: nats per token of the right answer; lost: more than full prefill's, question by question; gap"
    " closed: share of full reuse's loss that is repaired. reuse, lmcache: of chunks prefilled alone;"
    " selectors: of chunks behind what the setting shared_prefix says, or the arm's name. KL, top-1: the"
    " first token against full prefill's; KL answer: all tokens of the right answer; F1/full, exact,"
    " decision: the answer against full prefill's. F1: against the right answers. TTFT: time to"
    " first token, median. ~: the difference to full prefill is within noise: its 95 % interval holds 0.\n"
)

_DOUBTS = {
    "within noise": "Full reuse differs from full prefill only within noise: the gap says little here.",
    "negative": "Full reuse is better than full prefill here: there is no gap, and gap closed means nothing.",
}


def _share(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval.mean:.0%}"


def _noise(difference: Interval) -> str:
    """Return the mark of a number that may as well be full prefill's, and is not."""
    return "~" if difference.within_noise and difference.low < difference.high else ""


def _facts(results: Evaluation) -> str:
    full, form = results.arms[FULL], results.config["format"]
    doubt = _DOUBTS.get(full.gap or "")
    return f"{full.n} questions, format {form}; {where(results.machine)}.\n" + (f"{doubt}\n" if doubt else "")


_MARKERS = "osD^vPX*<>hp"


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
