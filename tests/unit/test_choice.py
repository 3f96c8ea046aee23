"""How a choice is written: one grammar, whoever reads or writes it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.choice import Choice, count, layers, number, one_of, written, yes_or_no
from blendrag.errors import ConfigError

WORDS = st.from_regex(r"[a-z_0-9+.\-]+", fullmatch=True)
CHOICES = st.builds(
    Choice,
    WORDS,
    st.none() | st.floats(0, 1),
    st.lists(WORDS, max_size=3).map(tuple),
    st.dictionaries(WORDS, WORDS, max_size=3),
)


@given(CHOICES)
def test_what_is_written_is_read_as_the_same_choice(choice: Choice) -> None:
    assert Choice.read(str(choice)) == choice


@given(st.text(alphabet="ab1:=@,. ", max_size=12))
def test_any_text_is_read_as_it_was_meant_or_refused_by_one_error(text: str) -> None:
    try:
        choice = Choice.read(text)
    except ConfigError:
        return
    assert Choice.read(str(choice)) == choice


def test_parts_of_a_choice_are_told_apart_in_any_order() -> None:
    choice = Choice.read("hkvd@0.15:metric=k:int8:check_layers=1+4")
    assert choice == Choice("hkvd", 0.15, ("int8",), {"metric": "k", "check_layers": "1+4"})
    assert str(choice) == "hkvd@0.15:int8:metric=k:check_layers=1+4"


@pytest.mark.parametrize(
    "text", ["hkvd:", "hkvd::k", "hkvd:=k", "hkvd:metric=", "a:b=c=d", "a,b", "a=b", "a:b@1"]
)
def test_text_that_is_no_choice_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not written as in hkvd@0\.15:metric=k"):
        Choice.read(text)


def test_number_that_is_none_and_argument_that_is_said_twice_are_named() -> None:
    with pytest.raises(ConfigError, match="'lots' is not a number"):
        Choice.read("hkvd@lots")
    with pytest.raises(ConfigError, match="says metric twice"):
        Choice.read("hkvd:metric=k:metric=v")


@given(st.floats(allow_nan=False))
def test_number_is_written_so_that_it_is_read_as_itself(value: float) -> None:
    assert float(written(value)) == value


@pytest.mark.parametrize(
    ("reader", "text", "value"),
    [
        (one_of("v", "k"), "k", "k"), (number(), "2.5", 2.5), (number(most=1.0), "1", 1.0), (count, "32", 32),
        (yes_or_no, "yes", True), (yes_or_no, "no", False), (layers, "1+4+8", (1, 4, 8)),
    ],
)  # fmt: skip
def test_argument_is_read_as_what_it_stands_for(reader: Any, text: str, value: object) -> None:
    assert reader(text) == value


def test_arguments_go_to_whoever_declares_them() -> None:
    choice = Choice.read("512:alpha=0.2:window=16")
    assert choice.read_arguments("kv_budget", {"alpha": number()}, {"window": count}) == (
        {"alpha": 0.2},
        {"window": 16},
    )
    with pytest.raises(ConfigError, match=r"unknown argument .window."):
        choice.read_arguments("kv_budget", {"alpha": number()})
