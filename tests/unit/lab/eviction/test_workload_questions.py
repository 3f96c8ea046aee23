"""Traces made of questions about paragraphs."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from blendrag.errors import SourceError
from blendrag.lab import questions
from blendrag.lab.eviction.source import retrieval_trace
from blendrag.lab.eviction.trace import RequestTrace
from blendrag.lab.options import EvictionOptions
from blendrag.lab.questions import Embedded, Questions, embedded, read_questions
from blendrag.models import DEFAULT_EMBEDDER

LOAD = EvictionOptions(Path("t"), "1", rate=5.0, seconds=400.0, top_k=3)


class Hashing:
    """Vectors of length 1 from the texts' hashes."""

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        rows = np.array([[b - 128 for b in hashlib.sha256(text.encode()).digest()] for text in texts], float)
        return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).tolist()


QUESTIONS = Questions(
    tuple(f"paragraph {i}" for i in range(60)),
    tuple(tuple(f"question {a}.{q}" for q in range(10)) for a in range(12)),
)


@cache
def corpus() -> Embedded:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(questions, "Embedder", lambda path, name: Hashing())
        return embedded(QUESTIONS, DEFAULT_EMBEDDER)


def draws(trace: RequestTrace) -> Counter[tuple[str, ...]]:
    return Counter(request.keys for request in trace.requests)


def test_chunks_are_the_closest() -> None:
    vectors = corpus()
    found = {tuple(f"chunk:{i}" for i in np.argsort(-(vectors.chunks @ q))[:3]) for q in vectors.questions}
    trace = retrieval_trace(vectors, LOAD)
    assert len(trace.requests) > 1500
    assert set(draws(trace)) <= found
    for request in trace.requests:
        assert request.sizes == tuple(vectors.sizes[int(key[6:])] for key in request.keys)


def test_path_is_named_by_all_that_leads_to_it() -> None:
    chunks, paths = (retrieval_trace(corpus(), replace(LOAD, paths=paths)) for paths in (False, True))
    assert paths.prefix and paths.tree and not chunks.tree
    for flat, path in zip(chunks.requests, paths.requests, strict=True):
        assert path.keys == tuple(" ".join(flat.keys[: depth + 1]) for depth in range(3))
        assert path.sizes == flat.sizes


def test_popularity_is_the_stated_one() -> None:
    flat = draws(retrieval_trace(corpus(), replace(LOAD, zipf=0.0)))
    skewed = draws(retrieval_trace(corpus(), replace(LOAD, zipf=1.5)))
    assert flat.most_common(1)[0][1] < 60 < 300 < skewed.most_common(1)[0][1]
    # The first article's share, and the share that its first question has of that.
    expected = 1 / (sum(i**-1.5 for i in range(1, 13)) * sum(i**-1.5 for i in range(1, 11)))
    assert skewed.most_common(1)[0][1] / skewed.total() == pytest.approx(expected, abs=0.05)


def test_other_questions_are_popular_after_a_turnover() -> None:
    trace = retrieval_trace(corpus(), replace(LOAD, zipf=1.5, turnovers=3))
    quarters = [Counter(r.keys for r in trace.requests if r.at // 100 == number) for number in range(4)]
    assert len({quarter.most_common(1)[0][0] for quarter in quarters}) == 4
    assert all(quarter.most_common(1)[0][1] > 75 for quarter in quarters)


def test_one_seed_gives_one_trace() -> None:
    one, again = (retrieval_trace(corpus(), LOAD, seed=2) for _ in range(2))
    assert one.requests == again.requests


def test_two_seeds_give_two_traces() -> None:
    one, other = (draws(retrieval_trace(corpus(), LOAD, seed=seed)) for seed in (2, 3))
    assert one.most_common(3) != other.most_common(3)


def test_arrivals_are_those_given() -> None:
    times = [0.0, 1.5, 7.0, 399.0, 500.0]
    assert [r.at for r in retrieval_trace(corpus(), LOAD, arrivals=times).requests] == times[:4]


@pytest.mark.parametrize("wrapped", [False, True])
def test_every_question_is_read(tmp_path: Path, wrapped: bool) -> None:
    paragraph = {"context": "c", "qas": [{"id": "1", "question": "q?", "answers": ["a"]}, {"question": "r?"}]}
    silent = {"paragraphs": [{"context": "d", "qas": []}]}
    articles = [{"title": "t", "paragraphs": [paragraph, paragraph]}, silent]
    path = tmp_path / "s.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"data": articles} if wrapped else articles).encode()))
    assert read_questions(path) == Questions(("c", "d"), (("q?", "r?", "q?", "r?"),))


@pytest.mark.parametrize("content", ["[]", "{}", "[{}]", "nonsense", '[{"paragraphs": []}]'])
def test_file_without_questions_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "s.json"
    path.write_text(content)
    with pytest.raises(SourceError):
        read_questions(path)
