"""The results of an evaluation for people: tables and the recommendation."""

from __future__ import annotations

from rich.console import Console

from blendrag.lab.bootstrap import Interval
from blendrag.lab.evaluate.arms import FULL
from blendrag.lab.evaluate.decoding import DECODING_LEGEND, decoding_table, shown_range
from blendrag.lab.evaluate.run import Evaluation
from blendrag.lab.results import where
from blendrag.tables import table_with


def print_evaluation(results: Evaluation, console: Console) -> None:
    """Print what each arm loses, how far it agrees with full prefill, what it is worth; what a budget of KV
    loses; what is recommended."""
    likelihood = table_with("arm", "NLL", "lost", "95 %", "gap closed", "95 %")
    agreement = table_with("arm", "KL", "KL answer", "top-1", "F1/full", "exact", "decision")
    usefulness = table_with("arm", "F1", "recomputed", "TTFT ms", "speed-up")
    for name, arm in results.arms.items():
        likelihood.add_row(
            name,
            _number(arm.nll_gold, ".2f"),
            f"{_noise(arm.nll_loss)}{_number(arm.nll_loss, '+z.2f')}",
            shown_range(arm.nll_loss, "z.2f"),
            _number(arm.gap_closed, "z.0%"),
            shown_range(arm.gap_closed, "z.0%"),
        )
        shares = (arm.top1_agreement, arm.f1_vs_full, arm.exact_text, arm.decision_agreement)
        agreement.add_row(
            name,
            *(_number(kl, ".3f") for kl in (arm.kl_first_token, arm.kl_answer)),
            *(_number(share, ".0%") for share in shares),
        )
        usefulness.add_row(
            name,
            f"{_noise(arm.f1_loss)}{_number(arm.f1, '.2f')}",
            _number(arm.recomputed, ".0%"),
            f"{arm.ttft_ms.median:,.0f}",
            f"{arm.speedup.mean:.1f}x",
        )
    for table in (likelihood, agreement, usefulness):
        console.print(table)
    console.print(_LEGEND, markup=False)
    if results.decoding:
        console.print(decoding_table(results.decoding))
        console.print(DECODING_LEGEND, markup=False)
    for text in (_facts(results), results.recommendation.why):
        console.print(text, markup=False)


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


def _number(interval: Interval | None, form: str) -> str:
    return "-" if interval is None else format(interval.mean, form)


def _noise(difference: Interval) -> str:
    """Return the mark of a number that may as well be full prefill's, and is not."""
    return "~" if difference.within_noise and difference.low < difference.high else ""


def _facts(results: Evaluation) -> str:
    full, form = results.arms[FULL], results.config["format"]
    doubt = _DOUBTS.get(full.gap or "")
    return f"{full.n} questions, format {form}; {where(results.machine)}.\n" + (f"{doubt}\n" if doubt else "")
