"""Formats whose records bring their documents with them: MuSiQue, HotpotQA, and the user's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydantic import AliasChoices, Field

from blendrag.lab.evaluate.formats.fields import Answers, Asked, Documents, Text
from blendrag.lab.evaluate.formats.format import Format, Row, register_format

_YES_NO = ("yes", "no")
_ANSWERS = AliasChoices("answers", "answer")


class _Musique(Asked):
    """As MuSiQue publishes it (paragraphs), or as CacheBlend's repository cuts it (ctxs)."""

    answers: Answers = Field(validation_alias=_ANSWERS)
    aliases: tuple[Text, ...] = Field((), validation_alias="answer_aliases")
    documents: Documents = Field(validation_alias=AliasChoices("ctxs", "paragraphs"))
    answerable: bool = True


class _Hotpot(Asked):
    """HotpotQA's distractor setting, with its own context or with ctxs."""

    id: str | int | None = Field(None, validation_alias=AliasChoices("id", "_id"))
    type: str
    answers: Answers = Field(validation_alias=_ANSWERS)
    documents: Documents = Field(validation_alias=AliasChoices("ctxs", "context"))


class _Own(Asked):
    answers: Answers = Field(validation_alias=_ANSWERS)
    documents: Documents
    choices: tuple[Text, ...] = ()


def _musique_rows(records: Sequence[_Musique], seed: int, count: int) -> Iterable[list[Row]]:
    """Asks for as few words as the answers have (CacheBlend, footnote 7)."""
    for each in records:
        if each.answerable:
            question = f"{each.question} Answer within 5 words."
            yield [Row(each.row_id, question, (*each.answers, *each.aliases), each.documents)]


def _hotpot_rows(records: Sequence[_Hotpot], seed: int, count: int) -> Iterable[list[Row]]:
    for each in records:
        choices = _YES_NO if each.answers[0].lower() in _YES_NO else ()
        yield [Row(each.row_id, each.question, each.answers, each.documents, choices)]


def _own_rows(records: Sequence[_Own], seed: int, count: int) -> Iterable[list[Row]]:
    for each in records:
        yield [Row(each.row_id, each.question, each.answers, each.documents, each.choices)]


register_format(Format("musique", _Musique, _musique_rows))
register_format(Format("hotpot", _Hotpot, _hotpot_rows))
register_format(Format("jsonl", _Own, _own_rows))
