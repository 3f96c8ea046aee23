"""Questions as retrieval answers them: which documents each is asked with, in which order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from blendrag.errors import ConfigError
from blendrag.lab.questions import Popularity, embedded, read_questions, retrieved


@dataclass(frozen=True, slots=True)
class RetrievedQuestion:
    """A question as retrieval answers it. documents: numbers of texts, closest first."""

    text: str
    documents: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Retrieval:
    """All questions as retrieval answers them, each once in ``asked``. texts: of all documents."""

    texts: tuple[str, ...]
    asked: tuple[RetrievedQuestion, ...]
    article: tuple[int, ...]  # of each question

    @classmethod
    def read(cls, path: Path, articles: int, top_k: int, embedder: str) -> Retrieval:
        """Read the first articles of a question set in SQuAD's format. Raises SourceError, ConfigError."""
        questions = read_questions(path, articles)
        if len(questions.paragraphs) < top_k:
            raise ConfigError(f"--top-k {top_k}: {path} has {len(questions.paragraphs)} paragraphs there")
        corpus = embedded(questions, embedder)
        texts = [text for article in questions.asked for text in article]
        found = retrieved(corpus, top_k).tolist()
        asked = tuple(RetrievedQuestion(text, tuple(own)) for text, own in zip(texts, found, strict=True))
        return cls(questions.paragraphs, asked, tuple(corpus.article.tolist()))

    def stream(self, count: int, zipf: float | None, seed: int) -> list[RetrievedQuestion]:
        """Return so many of the questions, drawn by popularity (rank**-zipf of articles, and of questions
        within each), or each once. Raises ConfigError if there are too few."""
        rng = np.random.default_rng(seed)
        if zipf is None:
            if count > len(self.asked):
                raise ConfigError(f"{count:,} questions are needed, and there are {len(self.asked):,}")
            return [self.asked[number] for number in rng.permutation(len(self.asked))[:count]]
        popularity = Popularity(np.array(self.article), zipf, rng)
        return [self.asked[popularity.draw()] for _ in range(count)]
