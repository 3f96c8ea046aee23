"""The results of an evaluation for people: tables and the recommendation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from blendrag.lab.canvas import where
from blendrag.lab.evaluate.summary import FULL, NEGATIVE, WITHIN_NOISE
from blendrag.lab.report import table_with

_NONE = "-"


def print_evaluation(results: Mapping[str, Any], console: Console) -> None:
    """What each arm loses, how far it agrees with full prefill, what it is worth; what is recommended.

    results: {"arms": of ``summarise``, "recommendation": of ``recommend``, "machine", "config"}; of the last
    two it shows ``machine``'s "model", "cpu" and "threads", and ``config``'s "format".
    """
    likelihood = table_with("arm", "NLL", "lost", "95 %", "gap closed", "95 %")
    agreement = table_with("arm", "KL", "top-1", "F1/full", "exact", "decision")
    usefulness = table_with("arm", "F1", "Rouge-L", "recomputed", "TTFT ms", "speed-up")
    for name, arm in results["arms"].items():
        likelihood.add_row(
            name,
            _number(arm["nll_gold"], ".2f"),
            f"{_noise(arm['nll_loss'])}{_number(arm['nll_loss'], '+z.2f')}",
            _range(arm["nll_loss"], "z.2f"),
            _number(arm["gap_closed"], "z.0%"),
            _range(arm["gap_closed"], "z.0%"),
        )
        agreement.add_row(
            name,
            _number(arm["kl_first_token"], ".3f"),
            *(_number(arm[key], ".0%") for key in ("top1_agreement", "f1_vs_full")),
            *(_number(arm[key], ".0%") for key in ("exact_text", "decision_agreement")),
        )
        usefulness.add_row(
            name,
            *(f"{_noise(arm[f'{key}_loss'])}{_number(arm[key], '.2f')}" for key in ("f1", "rouge_l")),
            _number(arm["recomputed"], ".0%"),
            f"{arm['ttft_ms']['median']:,.0f}",
            f"{arm['speedup']['mean']:.1f}x",
        )
    shown = (likelihood, agreement, usefulness, _LEGEND, _facts(results), results["recommendation"]["why"])
    for table in (likelihood, agreement, usefulness):
        table.columns[0].overflow = "fold"  # an arm cut short would be another one
    for part in shown:
        console.print(part, markup=False)


_LEGEND = (
    "NLL: nats per token of the right answer; lost: more than full prefill's, row by row; gap closed: share"
    " of full reuse's loss that is repaired. reuse, lmcache: of chunks prefilled alone; selectors: of chunks"
    " behind what the setting shared_prefix says, or the arm's name. KL, top-1: the first token against full"
    " prefill's; F1/full,"
    " exact, decision: the answer against full prefill's. F1, Rouge-L: against the right answers. TTFT: time"
    " to first token, median. ~: the difference to full prefill is within noise: its 95 % interval holds 0.\n"
)

_DOUBTS = {
    WITHIN_NOISE: "Full reuse differs from full prefill only within noise: the gap says little here.\n",
    NEGATIVE: "Full reuse is better than full prefill here: there is no gap, and gap closed means nothing.\n",
}


def _number(interval: Mapping[str, float] | None, form: str) -> str:
    return _NONE if interval is None else format(interval["mean"], form)


def _range(interval: Mapping[str, float] | None, form: str) -> str:
    if interval is None or interval["low"] == interval["high"]:
        return ""
    return f"{format(interval['low'], form)} to {format(interval['high'], form)}"


def _noise(difference: Mapping[str, float] | None) -> str:
    """The mark of a number that may as well be full prefill's; full prefill's own cannot be another."""
    if difference is None or difference["low"] == difference["high"] == 0.0:
        return ""
    return "~" if difference["low"] <= 0.0 <= difference["high"] else ""


def _facts(results: Mapping[str, Any]) -> str:
    full, rows = results["arms"][FULL], results["config"]["format"]
    return f"{full['n']} rows, format {rows}; {where(results['machine'])}.\n{_DOUBTS.get(full['gap'], '')}"
