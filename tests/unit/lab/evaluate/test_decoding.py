"""What is said of arms that decode from a budget of KV."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from blendrag.lab.evaluate.arms import parse_arms
from blendrag.lab.evaluate.decoding import DecodedSummary, decoding_table, summarise_decoding
from blendrag.lab.evaluate.samples import AnswerSample, Lost
from blendrag.settings import Settings

ARMS = parse_arms(["512:ada", "512:uniform", "2048:ada"], None, Settings())
WHOLE = "query@0.15"


def sample(question: int, arm: str, nll: float | None, kl: float = 0.0, kept: int = 0) -> AnswerSample:
    whole = AnswerSample(str(question), arm, 1.0, [{7: -0.1}], "", None, 1.0, 80, 12, {}, nll)
    return whole if arm == WHOLE else replace(whole, evicted=Lost(kl, kept))


@pytest.fixture
def decoding() -> dict[str, DecodedSummary]:
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


def test_what_a_budget_loses_is_compared_question_by_question(
    decoding: dict[str, DecodedSummary],
) -> None:
    ada, uniform = decoding[f"{WHOLE}:512:ada"], decoding[f"{WHOLE}:512:uniform"]
    assert (ada.n, ada.budget, ada.by, ada.kept.mean) == (20, 512, "ada", 0.5)
    assert ada.nll_loss is not None and ada.kl_to_uniform is not None
    assert (ada.nll_loss.low, ada.nll_loss.high) == pytest.approx((0.25, 0.25))
    assert (ada.kl_to_uniform.low, ada.kl_to_uniform.high) == pytest.approx((-0.03, -0.03))
    assert uniform.kl_to_uniform is None


def test_prompt_that_was_kept_whole_is_not_counted(
    decoding: dict[str, DecodedSummary],
) -> None:
    assert f"{WHOLE}:2048:ada" not in decoding


def test_budget_is_shown(decoding: dict[str, DecodedSummary]) -> None:
    console = Console(file=io.StringIO(), width=140)
    console.print(decoding_table(decoding))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "50.0%" in text and "+0.250" in text and "-0.0300" in text
