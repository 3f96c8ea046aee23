"""The format axis: how questions and documents are written in a file. One interface, one registry."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    model_validator,
)

from blendrag.errors import ConfigError, SourceError
from blendrag.lab.records import problem_of, read_records

_SHORT = "Answer the question from the documents. Give the answer in a few words, and nothing else."
_IN_ITS_LANGUAGE = f"{_SHORT} Use the language of the question."
_VALUE = (
    "Each document has a key and its value. Find the key that is asked for. Give its value, and nothing else."
)
_YES_NO = ("yes", "no")
_PIECE_TOKENS = 48  # whole paragraphs hide what full reuse loses; pieces of this size show it


@dataclass(frozen=True, slots=True)
class Question:
    """A question over documents.

    id: the same in every run, and no other question's.
    answers: all that are right, as they are written; the first is the one whose likelihood is measured.
    documents: their texts, in the order of the prompt.
    choices: the only answers there are to a question that asks for a decision, such as yes and no.
    before: of each document the text that stands before it where it was taken from; none where nobody knows.
    """

    id: str
    text: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]
    choices: tuple[str, ...] = ()
    before: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Format:
    """A way to find questions, answers and documents in a file, and to ask them.

    record: one item of the file (of its list, or of a line); what does not fit it is another format.
    questions: from all records, the seed of every random choice, and ``documents``, to the questions, in
        groups that share documents (articles, say). Each choice depends on the seed and the question alone.
    system: the system prompt.
    cut: tokens that documents are cut into, each piece's KV computed apart; None leaves them whole.
    documents: how many a prompt has, where the format chooses them; None where the file does.
    """

    name: str
    record: type[BaseModel]
    questions: Callable[[Sequence[Any], int, int], Iterable[list[Question]]]
    system: str = _SHORT
    cut: int | None = None
    documents: int | None = None


def find_format(name: str) -> Format:
    """Return the format called ``name``; ``kv:8``, say, is ``kv`` with 8 documents in a prompt.

    Raises ConfigError for an unknown name, or a number of documents where the file decides.
    """
    base, colon, count = name.partition(":")
    if base not in FORMATS:
        raise ConfigError(f"unknown format {base!r}; there are {', '.join(sorted(FORMATS))}")
    found = FORMATS[base]
    if not colon:
        return found
    if found.documents is None:
        raise ConfigError(f"format {name!r}: the documents of {base} are as many as the file has")
    if not (count.isascii() and count.isdigit() and int(count) > 0):
        raise ConfigError(f"format {name!r}: {count!r} is no number of documents")
    return replace(found, name=f"{base}:{int(count)}", documents=int(count))


# -- fields, in all the ways that the public sets write them ---------------------------------------


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("is blank")
    return text


def _document(value: Any) -> Any:
    """Read a text, an object with a text and perhaps a title, or HotpotQA's title and sentences."""
    match value:
        case {"text": str(text), **rest} | {"paragraph_text": str(text), **rest}:
            title = rest.get("title")
        case [str(title), [*sentences]]:
            text = "".join(map(str, sentences))
        case _:
            return value
    return f"{title}\n{text}" if title else text


def _answer(value: Any) -> Any:
    """Read an answer: a text, or SQuAD's object with a text and the place where it begins."""
    return value["text"] if isinstance(value, dict) and "text" in value else value


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


_Text = Annotated[str, AfterValidator(_not_blank)]
_Answer = Annotated[_Text, BeforeValidator(_answer)]
_Answers = Annotated[tuple[_Answer, ...], Field(min_length=1), BeforeValidator(_listed)]
_Documents = Annotated[tuple[Annotated[_Text, BeforeValidator(_document)], ...], Field(min_length=1)]


# -- a question per record, with its documents -----------------------------------------------------


class _Own(BaseModel):
    """A record of the user's own format. ``number``: its place in the file, the id of one that has none."""

    number: int = 0
    id: str | int | None = None
    question: _Text
    answers: _Answers = Field(validation_alias=AliasChoices("answers", "answer"))
    documents: _Documents
    choices: tuple[_Text, ...] = ()
    answerable: bool = True

    def asked(self) -> Question:
        id = str(self.number if self.id is None else self.id)
        return Question(id, self.question, self.answers, self.documents, self.choices)


class _Musique(_Own):
    """A record of MuSiQue as it publishes it (paragraphs), or as CacheBlend's repository cuts it (ctxs)."""

    documents: _Documents = Field(validation_alias=AliasChoices("ctxs", "paragraphs"))
    aliases: tuple[_Text, ...] = Field((), validation_alias="answer_aliases")

    def asked(self) -> Question:
        """Return the question, asking for as few words as the answers have (CacheBlend, footnote 7)."""
        own = super().asked()
        few = f"{own.text} Answer within 5 words."
        return replace(own, text=few, answers=(*own.answers, *self.aliases))


class _Hotpot(_Own):
    """A record of HotpotQA's distractor setting, with its own context or with ctxs."""

    id: str | int | None = Field(None, validation_alias=AliasChoices("id", "_id"))
    type: str
    documents: _Documents = Field(validation_alias=AliasChoices("ctxs", "context"))

    def asked(self) -> Question:
        own = super().asked()
        return replace(own, choices=_YES_NO if own.answers[0].lower() in _YES_NO else ())


def _as_recorded(records: Sequence[_Own], seed: int, count: int) -> Iterator[list[Question]]:
    for record in records:
        if record.answerable:
            yield [record.asked()]


# -- SQuAD and XQuAD: the paragraph that has the answer, among others of its article ---------------


class _SquadQuestion(BaseModel):
    id: str
    question: _Text
    answers: tuple[_Answer, ...]


class _SquadParagraph(BaseModel):
    context: _Text
    qas: list[_SquadQuestion]


class _SquadArticle(BaseModel):
    paragraphs: list[_SquadParagraph]


def _among_paragraphs(articles: Sequence[_SquadArticle], seed: int, count: int) -> Iterator[list[Question]]:
    for article in articles:
        before: dict[str, str] = {}  # by paragraph, each once
        texts = [each.context for each in article.paragraphs]
        for at, text in enumerate(texts):
            before.setdefault(text, "\n\n".join(texts[:at]))
        yield [
            _squad_question(before, paragraph.context, asked, seed, count)
            for paragraph in article.paragraphs
            for asked in paragraph.qas
            if asked.answers  # SQuAD 2.0 asks what no paragraph answers
        ]


def _squad_question(
    before: Mapping[str, str], context: str, asked: _SquadQuestion, seed: int, count: int
) -> Question:
    others = [text for text in before if text != context]
    rng = random.Random(f"{seed}:{asked.id}")
    documents = [context, *rng.sample(others, min(count - 1, len(others)))]
    rng.shuffle(documents)
    return Question(
        asked.id,
        asked.question,
        tuple(dict.fromkeys(asked.answers)),
        tuple(documents),
        before=tuple(before[document] for document in documents),
    )


# -- key-value retrieval ("Lost in the Middle"): copying, which small models can do as well --------


class _KeyValues(BaseModel):
    number: int = 0
    pairs: list[tuple[str, str]] = Field(validation_alias="ordered_kv_records")
    key: str
    value: str

    @model_validator(mode="after")
    def _has_the_pair(self) -> Self:
        if (self.key, self.value) not in self.pairs:
            raise ValueError("'key' and 'value' are none of the pairs")
        return self


def _among_pairs(records: Sequence[_KeyValues], seed: int, count: int) -> Iterator[list[Question]]:
    """Yield a document per pair, in the file's order, in which the answer's place is random."""
    for each in records:
        rng = random.Random(f"{seed}:{each.number}")
        others = [pair for pair in each.pairs if pair[0] != each.key]
        kept = {each.key, *(key for key, _ in rng.sample(others, min(count - 1, len(others))))}
        documents = tuple(f"Key: {key}\nValue: {value}" for key, value in each.pairs if key in kept)
        asked = f"What is the value of the key {each.key}?"
        yield [Question(str(each.number), asked, (each.value,), documents)]


FORMATS = {
    each.name: each
    for each in (
        Format("jsonl", _Own, _as_recorded),
        Format("musique", _Musique, _as_recorded),
        Format("hotpot", _Hotpot, _as_recorded),
        Format("squad", _SquadArticle, _among_paragraphs, documents=6),
        Format("squadsplit", _SquadArticle, _among_paragraphs, cut=_PIECE_TOKENS, documents=4),
        Format("xquad", _SquadArticle, _among_paragraphs, _IN_ITS_LANGUAGE, documents=5),
        Format("kv", _KeyValues, _among_pairs, _VALUE, documents=12),
    )
}


def read_questions(path: Path, format: Format, limit: int | None = None, seed: int = 0) -> list[Question]:
    """Return up to ``limit`` questions of a file, in a random order that takes from all groups (articles) in
    turn.

    The same file, format and seed give the same questions; a larger limit adds to them.
    Raises SourceError, naming the file and the line, and the format that fits where another does.
    """
    records = [
        _record(path, format, place, value, number)
        for number, (place, value) in enumerate(read_records(path), start=1)
    ]
    groups = list(format.questions(records, seed, format.documents or 0))
    seen: set[str] = set()
    for id in (question.id for group in groups for question in group):
        if id in seen:  # an id names a question's samples
            raise SourceError(f"{str(path)!r}: two questions have the id {id!r}")
        seen.add(id)
    if not seen:
        raise SourceError(f"{str(path)!r} has no question with an answer")
    return list(islice(_spread(groups, seed), limit))


def _record(path: Path, format: Format, place: str, value: Any, number: int) -> BaseModel:
    """Read a record. number: of the record in the file, from 1."""
    numbered = {**value, "number": number} if isinstance(value, dict) else value
    try:
        return format.record.model_validate(numbered)
    except ValidationError as error:
        fitting = [name for name, other in FORMATS.items() if number == 1 and _fits(other, numbered)]
        hint = f"; it fits --format {' or '.join(fitting)}" if fitting else ""
        message = f"{str(path)!r}, {place}, is not in the format {format.name}: {problem_of(error)}{hint}"
        raise SourceError(message) from None


def _fits(format: Format, value: Any) -> bool:
    try:
        format.record.model_validate(value)
    except ValidationError:
        return False
    return True


def _spread(groups: Iterable[Sequence[Question]], seed: int) -> Iterator[Question]:
    """Yield one question of every group, then another of every group, and so on."""
    rng = random.Random(seed)
    mixed = [rng.sample(group, len(group)) for group in groups]
    rng.shuffle(mixed)
    for one_of_each in zip_longest(*mixed):
        yield from (question for question in one_of_each if question is not None)
