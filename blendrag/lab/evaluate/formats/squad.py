"""SQuAD and XQuAD: the paragraph that has the answer, among others of the same article."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence

from pydantic import BaseModel

from blendrag.lab.evaluate.formats.fields import Answer, Text
from blendrag.lab.evaluate.formats.format import SHORT_ANSWER, Format, Row, register_format

# Whole paragraphs hide what full reuse loses; pieces of this size show it.
_CUT = 48


class _Question(BaseModel):
    id: str
    question: Text
    answers: tuple[Answer, ...]


class _Paragraph(BaseModel):
    context: Text
    qas: list[_Question]


class _Article(BaseModel):
    paragraphs: list[_Paragraph]


def _rows(articles: Sequence[_Article], seed: int, count: int) -> Iterable[list[Row]]:
    for article in articles:
        yield list(_rows_of(article, seed, count))


def _rows_of(article: _Article, seed: int, count: int) -> Iterator[Row]:
    texts = list(dict.fromkeys(paragraph.context for paragraph in article.paragraphs))
    for paragraph in article.paragraphs:
        others = [text for text in texts if text != paragraph.context]
        for asked in paragraph.qas:
            if not asked.answers:  # SQuAD 2.0 asks what no paragraph answers
                continue
            rng = random.Random(f"{seed}:{asked.id}")
            documents = [paragraph.context, *rng.sample(others, min(count - 1, len(others)))]
            rng.shuffle(documents)
            yield Row(asked.id, asked.question, tuple(dict.fromkeys(asked.answers)), tuple(documents))


register_format(Format("squad", _Article, _rows, documents=6))
register_format(Format("squadsplit", _Article, _rows, documents=4, cut=_CUT))
register_format(
    Format("xquad", _Article, _rows, f"{SHORT_ANSWER} Use the language of the question.", documents=5)
)
