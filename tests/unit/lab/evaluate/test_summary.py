"""From samples to numbers, also of arms that decode from a budget of KV."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from blendrag.errors import ConfigError
from blendrag.lab.bootstrap import Interval
from blendrag.lab.evaluate.arms import parse_arms
from blendrag.lab.evaluate.decoding import DecodedSummary, decoding_table, summarise_decoding
from blendrag.lab.evaluate.formats import Question
from blendrag.lab.evaluate.report import Evaluation
from blendrag.lab.evaluate.samples import AnswerSample, Lost
from blendrag.lab.evaluate.summary import summarise
from blendrag.settings import Settings
from blendrag.tables import markdown

Decoded = dict[str, DecodedSummary]
Samples = list[AnswerSample]
Questions = list[Question]
PROMISED = (
    "f1", "nll_gold", "gap_closed", "kl_first_token", "kl_answer", "top1_agreement", "f1_vs_full",
)  # fmt: skip


def without(samples: Samples, arm: str, row: str = "") -> Samples:
    return [sample for sample in samples if not (sample.arm == arm and (not row or sample.question == row))]


def test_numbers_are_those_put_in(results: Evaluation) -> None:
    arms = results.arms
    for name, lost, closed in (("hkvd@0.05", 0.3, 0.7), ("hkvd@0.15", 0.05, 0.95), ("reuse", 1.0, 0.0)):
        arm = arms[name]
        assert arm.nll_loss.mean == pytest.approx(lost, abs=0.01)
        assert arm.gap_closed.mean == pytest.approx(closed, abs=0.01)
        assert arm.gap_closed.low <= closed <= arm.gap_closed.high
        assert arm.nll_loss.high - arm.nll_loss.low < 0.03
    assert arms["reuse"].speedup.mean == pytest.approx(10.0)
    assert arms["reuse"].ttft_ms.median == 40.0
    assert arms["reuse"].top1_agreement.mean == arms["reuse"].f1.mean == 0.0
    assert arms["reuse"].decision_agreement.mean == 0.0
    assert arms["hkvd@0.05"].recomputed.mean == pytest.approx(0.05)
    assert arms["reuse"].kl_first_token.mean > arms["hkvd@0.15"].kl_first_token.mean > 0.0


def test_every_number_that_scripts_are_promised_is_there(results: Evaluation) -> None:
    for arm in results.arms.values():
        assert arm.n == 60
        for name in PROMISED:
            assert getattr(arm, name).low <= getattr(arm, name).mean <= getattr(arm, name).high


def test_full_prefill_does_not_differ_from_itself(results: Evaluation) -> None:
    full = results.arms["full"]
    nothing, all_of_it = Interval(0.0, 0.0, 0.0), Interval(1.0, 1.0, 1.0)
    assert full.nll_loss == full.f1_loss == full.kl_first_token == nothing
    assert full.kl_answer == nothing
    for name in ("gap_closed", "top1_agreement", "exact_text", "f1_vs_full", "decision_agreement", "speedup"):
        assert getattr(full, name) == all_of_it
    assert full.recomputed is None


def test_row_that_an_arm_has_not_answered_counts_for_no_arm(samples: Samples, rows: Questions) -> None:
    samples = without(without(samples, "full", "3"), "reuse", "5")
    arms = summarise(samples, rows)
    assert {arm.n for arm in arms.values()} == {58}
    kept = [sample for sample in samples if sample.question not in ("3", "5")]
    assert arms == summarise(kept, [row for row in rows if row.id not in ("3", "5")])


def test_order_of_the_samples_does_not_matter(samples: Samples, rows: Questions) -> None:
    mixed = samples.copy()
    random.Random(1).shuffle(mixed)
    assert summarise(mixed, rows[::-1]) == summarise(samples, rows)


def test_row_measured_twice_does_not_count_twice(samples: Samples, rows: Questions) -> None:
    again = [replace(sample, nll=99.0) for sample in samples[:3]]
    assert summarise([*again, *samples], rows) == summarise(samples, rows)


def test_gap_that_may_be_none_is_not_passed_off_as_one(samples: Samples, rows: Questions) -> None:
    nll = {sample.question: sample.nll for sample in samples if sample.arm == "full"}
    harmless = [
        replace(sample, nll=nll[sample.question] + (0.21 if int(sample.question) % 2 else -0.2))
        for sample in samples
        if sample.arm == "reuse"
    ]
    arms = summarise([*without(samples, "reuse"), *harmless], rows)
    assert {arm.gap for arm in arms.values()} == {"within noise"}
    assert arms["hkvd@0.15"].gap_closed is not None
    assert {arm.gap for arm in summarise(samples, rows).values()} == {"clear"}


def test_reuse_better_than_full_prefill_is_not_a_gap(samples: Samples, rows: Questions) -> None:
    nll = {sample.question: sample.nll for sample in samples if sample.arm == "full"}
    better = [replace(each, nll=nll[each.question] - 0.3) for each in samples if each.arm == "reuse"]
    arms = summarise([*without(samples, "reuse"), *better], rows)
    assert {arm.gap for arm in arms.values()} == {"negative"}


def test_gap_of_a_run_without_full_reuse_is_not_made_up(samples: Samples, rows: Questions) -> None:
    arms = summarise(without(samples, "reuse"), rows)
    assert {(arm.gap_closed is None, arm.gap) for arm in arms.values()} == {(True, None)}


def test_decisions_of_rows_without_choices_are_not_agreement(samples: Samples, rows: Questions) -> None:
    arms = summarise(samples, [replace(row, choices=()) for row in rows])
    assert {arm.decision_agreement for arm in arms.values()} == {None}


def test_arms_that_share_no_row_are_not_compared(samples: Samples, rows: Questions) -> None:
    apart = [sample for sample in samples if (sample.arm == "full") == (sample.question == "1")]
    for impossible in ([], without(samples, "full"), apart):
        with pytest.raises(ConfigError, match="no question was answered by all arms"):
            summarise(impossible, rows)


def test_kl_of_the_answer_is_the_mean_over_its_tokens(samples: Samples, rows: Questions) -> None:
    """The first of two tokens differs; then the second does, by as much; then both."""
    (first, *_), (full, *_) = ([each for each in samples if each.arm == arm] for arm in ("reuse", "full"))
    reference, other = full.logprobs[0], first.logprobs[0]
    kl = {}
    for name, logprobs in {"1": [other, reference], "2": [reference, other], "both": [other, other]}.items():
        own = replace(first, logprobs=logprobs)
        answered = replace(full, logprobs=[reference, reference])
        kl[name] = summarise([answered, own], rows)["reuse"]
    assert kl["1"].kl_answer.mean == pytest.approx(kl["1"].kl_first_token.mean / 2)
    assert kl["2"].kl_answer == kl["1"].kl_answer and kl["2"].kl_first_token.mean == 0
    assert kl["both"].kl_answer.mean == pytest.approx(kl["both"].kl_first_token.mean)
    assert kl["both"].kl_answer.mean > 0


# -- arms that decode from a budget of KV ---------------------------------------------------------------

ARMS = parse_arms(["512:ada", "512:uniform", "2048:ada"], None, Settings())
WHOLE = "query@0.12"


def sample(question: int, arm: str, nll: float | None, kl: float = 0.0, kept: int = 0) -> AnswerSample:
    whole = AnswerSample(str(question), arm, 1.0, [{7: -0.1}], "", None, 1.0, 80, 12, {}, nll)
    return whole if arm == WHOLE else replace(whole, evicted=Lost(kl, kept))


@pytest.fixture
def decoding() -> Decoded:
    """20 questions, of prompts of 1,000 tokens; the answer of one is a single token."""
    samples = []
    for n in range(20):
        nll = None if n == 3 else 1.0 + n / 10
        more = None if nll is None else nll + 0.25
        samples += [
            sample(n, WHOLE, nll),
            sample(n, f"{WHOLE}:512:uniform", nll, 0.1 + n / 100, 500),
            sample(n, f"{WHOLE}:512:ada", more, 0.07 + n / 100, 500),
            sample(n, f"{WHOLE}:2048:ada", nll),
        ]
    return summarise_decoding(samples, ARMS, {str(n): 1000 for n in range(20)})


def test_what_a_budget_loses_is_compared_question_by_question(decoding: Decoded) -> None:
    ada, uniform = decoding[f"{WHOLE}:512:ada"], decoding[f"{WHOLE}:512:uniform"]
    assert (ada.n, ada.budget, ada.by, ada.kept.mean) == (20, 512, "ada", 0.5)
    assert ada.nll_loss is not None and ada.kl_to_uniform is not None
    assert (ada.nll_loss.low, ada.nll_loss.high) == pytest.approx((0.25, 0.25))
    assert (ada.kl_to_uniform.low, ada.kl_to_uniform.high) == pytest.approx((-0.03, -0.03))
    assert uniform.kl_to_uniform is None


def test_prompt_that_was_kept_whole_is_not_counted(decoding: Decoded) -> None:
    assert f"{WHOLE}:2048:ada" not in decoding


def test_budget_is_shown(decoding: Decoded) -> None:
    text = markdown(decoding_table(decoding))
    assert "50.0%" in text and "+0.250" in text and "-0.0300" in text
