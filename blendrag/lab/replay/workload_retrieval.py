"""From questions about paragraphs to a trace of retrieved chunks.

Question sets ask everything once, so a popularity has to be stated. Here it is Zipf twice: over articles, and
over the questions of an article. Questions about one subject then find the same paragraphs, as RAGCache saw
(section 3: 3 % of the documents draw 60 % of the requests).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, TypeAdapter

from blendrag.errors import SourceError
from blendrag.lab.replay.lines import problem_of
from blendrag.lab.replay.request import Request, Trace
from blendrag.lab.replay.workload_dialogs import four_characters

Vectors = NDArray[np.float32]
LATELY = 200  # questions that a chunk is compared with
NEAR = 10  # the similarity is the mean of so many closest ones


class _Asked(BaseModel):
    question: str


class _Paragraph(BaseModel):
    context: str
    qas: list[_Asked]


class _Article(BaseModel):
    paragraphs: list[_Paragraph]


class _Set(BaseModel):
    data: list[_Article]


class Embeds(Protocol):
    """What turns texts into vectors of length 1: :class:`blendrag.embedder.Embedder`."""

    name: str

    def embed(self, texts: Sequence[str]) -> list[list[float]]: ...


@dataclass(frozen=True, slots=True)
class Questions:
    """A corpus and what is asked of it. paragraphs: each text once. asked: of each article, its questions."""

    paragraphs: tuple[str, ...]
    asked: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Embedded:
    """The same as vectors. chunks: [paragraphs, dim]; questions: [all questions in order, dim];
    article: of each question."""

    chunks: Vectors
    questions: Vectors
    article: NDArray[np.int64]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RetrievalLoad:
    """Who asks what, when.

    rate: questions a second, Poisson, unless arrivals are given. seconds: length of the trace.
    top_k: chunks of a prompt, closest first. articles_zipf, questions_zipf: the exponents s of the popularity
        rank**-s of articles, and of questions within each.
    drift: at this share of the trace other articles become the popular ones; None: never.
    """

    rate: float = 2.0
    seconds: float = 1800.0
    top_k: int = 5
    articles_zipf: float = 1.0
    questions_zipf: float = 1.0
    drift: float | None = None


def read_questions(path: Path) -> Questions:
    """SQuAD's JSON, gzipped or not, with or without its outermost ``{"data": ...}``. Raises SourceError."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        loaded = json.loads(raw)
        articles = (
            _Set.model_validate(loaded).data
            if isinstance(loaded, dict)
            else TypeAdapter(list[_Article]).validate_python(loaded)
        )
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise SourceError(
            f"{str(path)!r} has neither hash_ids nor turns, and is no question set in SQuAD's format:"
            f" {problem_of(error)}"
        ) from error
    asked = tuple(
        questions
        for article in articles
        if (questions := tuple(q.question for paragraph in article.paragraphs for q in paragraph.qas))
    )
    if not asked:
        raise SourceError(f"{str(path)!r} has no questions")
    return Questions(tuple(dict.fromkeys(p.context for a in articles for p in a.paragraphs)), asked)


def embedded(
    questions: Questions,
    embedder: Embeds,
    folder: Path | None = None,
    tokens: Callable[[str], int] = four_characters,
) -> Embedded:
    """Vectors of a corpus and its questions; kept in ``folder``, since thousands of texts take a minute."""
    asked = [question for article in questions.asked for question in article]
    texts = [*questions.paragraphs, *asked]
    digest = hashlib.sha256("\0".join([embedder.name, *texts]).encode()).hexdigest()[:32]
    kept = folder / f"vectors-{digest}.npy" if folder else None
    if kept and kept.exists():
        vectors = np.load(kept, allow_pickle=False)
    else:
        vectors = np.asarray(embedder.embed(texts), np.float32)
        if kept:
            kept.parent.mkdir(parents=True, exist_ok=True)
            np.save(kept, vectors)
    count = len(questions.paragraphs)
    article = np.repeat(np.arange(len(questions.asked)), [len(a) for a in questions.asked])
    return Embedded(vectors[:count], vectors[count:], article, tuple(map(tokens, questions.paragraphs)))


def retrieval_trace(
    corpus: Embedded,
    load: RetrievalLoad | None = None,
    *,
    seed: int = 0,
    arrivals: Sequence[float] | None = None,
    name: str = "retrieval",
) -> Trace:
    """Requests for the ``top_k`` chunks closest (cosine) to questions drawn by popularity.

    ``arrivals``: seconds, ascending; instead of Poisson ones. Which articles and questions are the popular
    ones is drawn by ``seed``.
    """
    load = load or RetrievalLoad()
    rng = np.random.default_rng(seed)
    if arrivals is None:
        gaps = rng.exponential(1.0 / load.rate, int(load.rate * load.seconds * 1.5) + 100)
        arrivals = np.cumsum(gaps).tolist()
    times = [at for at in arrivals if at < load.seconds]
    popularity = first = _Popularity(corpus.article, load, rng)
    turned = None if load.drift is None else load.drift * load.seconds
    asked: list[int] = []
    for at in times:
        if turned is not None and at >= turned:
            popularity, turned = _Popularity(corpus.article, load, rng), None
        asked.append(popularity.draw())
    found = np.argsort(-(corpus.questions @ corpus.chunks.T), axis=1, kind="stable")[:, : load.top_k]
    requests = []
    for place, (at, question) in enumerate(zip(times, asked, strict=True)):
        chunks = found[question]
        lately = corpus.questions[asked[max(0, place - LATELY) : place]]
        requests.append(
            Request(
                at,
                tuple(f"chunk:{chunk}" for chunk in chunks),
                tuple(corpus.sizes[chunk] for chunk in chunks),
                similarities=tuple(similarity(corpus.chunks[chunks], lately).tolist()),
            )
        )
    known = _of_chunks(first.chances, found, corpus.sizes) if popularity is first else {}
    return Trace(name, requests, prefix=False, unit="tokens", popularity=known)


def _of_chunks(
    chances: NDArray[np.float64], found: NDArray[np.int64], sizes: Sequence[int]
) -> dict[str, tuple[float, int]]:
    """How probable it is that a request asks for each chunk, and its tokens; see :class:`Trace`.

    chances: [questions]; found: [questions, top_k] chunks.
    """
    each = np.bincount(found.ravel(), np.repeat(chances, found.shape[1]), len(sizes))
    return {f"chunk:{chunk}": (float(each[chunk]), sizes[chunk]) for chunk in np.flatnonzero(each)}


def similarity(chunks: Vectors, lately: Vectors) -> Vectors:
    """[chunks]: how much each chunk is asked about: mean cosine of the closest of the latest questions.

    chunks: [chunks, dim]; lately: [questions, dim]. 0 where fewer than ``NEAR`` were asked.
    """
    if len(lately) < NEAR:
        return np.zeros(len(chunks), np.float32)
    cosines = np.partition(chunks @ lately.T, len(lately) - NEAR, axis=1)[:, -NEAR:]
    mean: Vectors = cosines.mean(axis=1)
    return mean


class _Popularity:
    """Which question is asked next."""

    def __init__(self, article: NDArray[np.int64], load: RetrievalLoad, rng: np.random.Generator) -> None:
        self._rng = rng
        count = int(article.max()) + 1
        self._articles = _zipf(rng.permutation(count) + 1, load.articles_zipf)
        self._questions = [np.flatnonzero(article == i) for i in range(count)]
        self._within = [_zipf(rng.permutation(len(q)) + 1, load.questions_zipf) for q in self._questions]

    @property
    def chances(self) -> NDArray[np.float64]:
        """[questions]: of each, to be the one that is drawn."""
        chances = np.zeros(sum(map(len, self._questions)))
        for share, questions, within in zip(
            np.diff(self._articles, prepend=0.0), self._questions, self._within, strict=True
        ):
            chances[questions] = share * np.diff(within, prepend=0.0)
        return chances

    def draw(self) -> int:
        article = int(np.searchsorted(self._articles, self._rng.random()))
        return int(self._questions[article][np.searchsorted(self._within[article], self._rng.random())])


def _zipf(ranks: NDArray[np.int64], exponent: float) -> NDArray[np.float64]:
    """Cumulated probabilities of rank**-exponent."""
    weights = ranks.astype(np.float64) ** -exponent
    total = np.cumsum(weights) / weights.sum()
    total[-1] = 1.0
    return total
