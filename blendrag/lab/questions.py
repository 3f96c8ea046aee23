"""A question set as a corpus that is asked: what retrieval finds, what is popular, and when it is asked.

Question sets ask everything once, so a popularity has to be stated. Here it is Zipf twice: over articles, and
over the questions of an article. Questions about one subject then find the same paragraphs, as RAGCache saw
(section 3: 3 % of the documents draw 60 % of the requests).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from blendrag.embedder import Embedder
from blendrag.errors import ConfigError, SourceError
from blendrag.lab.records import numbered_lines, problem_of, read_records, read_text, wrong_line
from blendrag.models import resolve_embedder

Vectors = NDArray[np.float32]
AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


class _Asked(BaseModel):
    question: str


class _Paragraph(BaseModel):
    context: str
    qas: list[_Asked]


class _Article(BaseModel):
    paragraphs: list[_Paragraph]


@dataclass(frozen=True, slots=True)
class Questions:
    """A corpus and what is asked of it. paragraphs: each text once. asked: of each article, its questions."""

    paragraphs: tuple[str, ...]
    asked: tuple[tuple[str, ...], ...]


def read_questions(path: Path, most: int | None = None) -> Questions:
    """Read SQuAD's JSON, gzipped or not, with or without its outermost ``{"data": ...}``; of the first
    ``most`` articles. Raises SourceError."""
    articles = []
    for place, record in read_records(path)[:most]:
        try:
            articles.append(_Article.model_validate(record))
        except ValidationError as error:
            raise SourceError(
                f"{str(path)!r} is no question set in SQuAD's format: {place}: {problem_of(error)}"
            ) from error
    asked = tuple(
        questions
        for article in articles
        if (questions := tuple(q.question for paragraph in article.paragraphs for q in paragraph.qas))
    )
    if not asked:
        raise SourceError(f"{str(path)!r} has no questions")
    return Questions(tuple(dict.fromkeys(p.context for a in articles for p in a.paragraphs)), asked)


@dataclass(frozen=True, slots=True)
class Embedded:
    """A corpus as vectors. chunks: [paragraphs, dim]; questions: [all questions in order, dim];
    article: of each question."""

    chunks: Vectors
    questions: Vectors
    article: NDArray[np.int64]
    sizes: tuple[int, ...]


def embedded(questions: Questions, embedder: str) -> Embedded:
    """Return a corpus and its questions as vectors."""
    asked = [question for article in questions.asked for question in article]
    model = Embedder(resolve_embedder(embedder), name=embedder)
    vectors = np.array(model.embed([*questions.paragraphs, *asked]), np.float32)
    count = len(questions.paragraphs)
    article = np.repeat(np.arange(len(questions.asked)), [len(a) for a in questions.asked])
    sizes = tuple(map(four_characters, questions.paragraphs))
    return Embedded(vectors[:count], vectors[count:], article, sizes)


def four_characters(text: str) -> int:
    """Return the tokens of a text, where no tokenizer is at hand: one for every 4 characters."""
    return (len(text) + 3) // 4


def retrieved(corpus: Embedded, top_k: int) -> NDArray[np.int64]:
    """Return the chunks closest (cosine) to each question, closest first, [questions, top_k]."""
    return np.argsort(-(corpus.questions @ corpus.chunks.T), axis=1, kind="stable")[:, :top_k]


@dataclass(frozen=True, slots=True)
class RetrievedQuestion:
    """A question as retrieval answers it. documents: numbers of paragraphs, closest first."""

    text: str
    documents: tuple[int, ...]


def question_stream(
    asked: Sequence[RetrievedQuestion], article: NDArray[np.int64], count: int, zipf: float | None, seed: int
) -> list[RetrievedQuestion]:
    """Return ``count`` of the questions, drawn by popularity, or each once. article: of each. Raises
    ConfigError if there are too few."""
    rng = np.random.default_rng(seed)
    if zipf is None:
        if count > len(asked):
            raise ConfigError(f"{count:,} questions are needed, and there are {len(asked):,}")
        return [asked[number] for number in rng.permutation(len(asked))[:count]]
    popularity = Popularity(article, zipf, rng)
    return [asked[popularity.draw()] for _ in range(count)]


class Popularity:
    """The popularity of questions, which says which one is asked next. article: of each question, from 0."""

    def __init__(self, article: NDArray[np.int64], zipf: float, rng: np.random.Generator) -> None:
        self._rng = rng
        count = int(article.max()) + 1
        self._articles = _zipf(rng.permutation(count) + 1, zipf)
        self._questions = [np.flatnonzero(article == i) for i in range(count)]
        self._within = [_zipf(rng.permutation(len(q)) + 1, zipf) for q in self._questions]

    def draw(self) -> int:
        article = int(np.searchsorted(self._articles, self._rng.random()))
        return int(self._questions[article][np.searchsorted(self._within[article], self._rng.random())])


def _zipf(ranks: NDArray[np.int64], exponent: float) -> NDArray[np.float64]:
    """Return cumulated probabilities of rank**-exponent."""
    weights = ranks.astype(np.float64) ** -exponent
    total = np.cumsum(weights) / weights.sum()
    total[-1] = 1.0
    return total


def read_azure(path: Path) -> list[float]:
    """Read when requests came, seconds since the first: what was in them has to be drawn
    (:func:`blendrag.lab.eviction.source.retrieval_trace`).

    Raises SourceError, naming file and line, for what is no such record, for times that run backwards, and
    for a file without requests.
    """
    arrivals: list[float] = []
    first: datetime | None = None
    for number, line in numbered_lines(read_text(path)):
        try:
            stamp, *tokens = line.split(",")
            if number == 1 and [stamp, *tokens] == AZURE_COLUMNS:
                continue
            # seven digits of a second: one more than Python knows
            time = datetime.fromisoformat(stamp[:26])
            first = first or time
            at = (time - first).total_seconds()
            if len(tokens) != 2 or min(map(int, tokens)) < 0:
                raise ValueError("not two numbers of tokens")
        except (ValueError, TypeError) as error:
            raise wrong_line(path, number, f"not {', '.join(AZURE_COLUMNS)}: {error}") from None
        if arrivals and at < arrivals[-1]:
            raise wrong_line(path, number, "TIMESTAMP: earlier than that of the line before")
        arrivals.append(at)
    if not arrivals:
        raise SourceError(f"{str(path)!r} holds no requests")
    return arrivals
