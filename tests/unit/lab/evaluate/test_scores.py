"""How answers are compared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.lab.evaluate.summary import f1, same_text


@pytest.mark.parametrize(
    ("text", "answers", "score"),
    [
        ("The Eiffel Tower!", ["Eiffel tower"], 1.0),
        ("in Paris, France", ["Paris"], 0.5),
        ("Paris", ["Lyon", "paris"], 1.0),
        ("Paris Paris", ["Paris"], 2 / 3),
        ("London", ["Paris"], 0.0),
        ("", ["Paris"], 0.0),
        ("1,000", ["1000"], 1.0),
        ("洛杉矶的国王队。", ["洛杉矶国王队"], 12 / 13),
        ("136次", ["136 次"], 1.0),
        ("Röntgen", ["röntgen"], 1.0),
    ],
)
def test_f1_is_that_by_hand(text: str, answers: list[str], score: float) -> None:
    assert f1(text, answers) == pytest.approx(score)


@given(st.text(), st.text())
def test_answer_that_is_the_same_does_not_lose(text: str, other: str) -> None:
    assert f1(text, [text]) == 1.0
    assert f1(text, [other]) == pytest.approx(f1(other, [text]))
    assert f1(text, [other, text]) == 1.0
    assert 0.0 <= f1(text, [other]) <= 1.0
    if same_text(text, other):
        assert f1(text, [other]) == 1.0


def test_blank_answers_to_both_do_not_count_as_different() -> None:
    assert f1(" ", ["\n"]) == 1.0
    assert same_text("The.", "")


def test_order_of_words_is_not_ignored_by_the_exact_text() -> None:
    assert f1("Ada met Bob", ["Bob met Ada"]) == 1.0
    assert not same_text("Ada met Bob", "Bob met Ada")
    assert same_text("Ada met Bob.", "ada met  the Bob")
