"""What a question's answer looks like on a terminal, and in a pipe."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from blendrag import Piece
from blendrag.cli.answering import print_stream
from blendrag.index.answering import AnswerStream


def pieces(*thoughts: str) -> Generator[Piece]:
    whole: Any = object()  # an answer, which nobody looks at here
    yield from (Piece("", reasoning=thought) for thought in thoughts)
    yield Piece("Good ")
    yield Piece("day.", whole)


def test_thinking_is_printed_where_asked_for_only(capsys: pytest.CaptureFixture[str]) -> None:
    print_stream(AnswerStream(pieces("Let me ", "[see].")))
    assert capsys.readouterr().out == "Good day.\n"
    print_stream(AnswerStream(pieces("Let me ", "[see].")), show_thinking=True)
    assert capsys.readouterr().out == "Let me [see].\nGood day.\n"
    print_stream(AnswerStream(pieces()), show_thinking=True)
    assert capsys.readouterr().out == "Good day.\n"
