"""MapRerank reads an answer and its score out of whatever a model writes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.lab.evaluate.map_arms import scored


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("Paris\nScore: 90", ("Paris", 90)),
        ("Paris.  score:7 of 100", ("Paris.", 7)),
        ("In two\nlines\nSCORE: 100\nand more", ("In two\nlines", 100)),
        ("Paris\nScore: 900", ("Paris", 100)),
        ("Paris", ("Paris", 0)),
        ("Paris, with a high score", ("Paris, with a high score", 0)),
    ],
)
def test_score_is_read_as_part_of_the_answer(text: str, read: tuple[str, int]) -> None:
    assert scored(text) == read


@given(st.text())
def test_score_leaves_its_scale(text: str) -> None:
    answer, score = scored(text)
    assert 0 <= score <= 100 and answer == answer.strip() and answer in text
