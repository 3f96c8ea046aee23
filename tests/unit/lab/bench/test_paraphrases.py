"""The set of questions that a load consists of."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from blendrag.lab.bench.paraphrases import PHRASINGS, Query, extended_set

TEXTS = [" ".join(f"w{number}x{word}" for word in range(40)) for number in range(12)]


def by_words(texts: Sequence[str]) -> list[list[float]]:
    """Vectors of length 1 whose closeness is how many words two texts share."""
    words = sorted({word for text in TEXTS for word in text.split()})
    counts = np.array([[word in set(text.split()) for word in words] for text in texts], dtype=float)
    noise = np.linspace(0, 1e-6, len(texts))[:, None] * np.arange(len(words))  # no two chunks are as near
    vectors = counts + noise
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).tolist()


@pytest.fixture(scope="module")
def queries() -> list[Query]:
    return extended_set(TEXTS, by_words, 9, 4, seed=3)


def test_question_lacks_a_phrasing_or_is_asked_twice(queries: list[Query]) -> None:
    assert len(queries) == 9 * len(PHRASINGS) == len({query.question for query in queries})
    for subject in range(9):
        assert sum(query.subject == subject for query in queries) == len(PHRASINGS)


def test_prompt_has_a_chunk_twice_or_lacks_the_one_it_is_about(queries: list[Query]) -> None:
    for query in queries:
        assert len(set(query.chunks)) == 4
        about = next(number for number in range(len(TEXTS)) if f"w{number}x" in query.question)
        assert query.chunks[0] == about


def test_phrasings_of_one_question_stand_together(queries: list[Query]) -> None:
    subjects = [query.subject for query in queries]
    beside = sum(one == other for one, other in itertools.pairwise(subjects))
    assert beside < 9 * (len(PHRASINGS) - 1) / 2


def test_same_seed_gives_another_set(queries: list[Query]) -> None:
    assert extended_set(TEXTS, by_words, 9, 4, seed=3) == queries
    assert extended_set(TEXTS, by_words, 9, 4, seed=4) != queries


def test_shuffling_changes_what_is_retrieved_or_leaves_the_order(queries: list[Query]) -> None:
    shuffled = extended_set(TEXTS, by_words, 9, 4, seed=3, shuffled=True)
    assert [sorted(query.chunks) for query in shuffled] == [sorted(query.chunks) for query in queries]
    assert sum(one.chunks != other.chunks for one, other in zip(shuffled, queries, strict=True)) > 20


def test_chunk_shorter_than_a_subject_is_asked_about() -> None:
    texts = ["one two", "three"]
    queries = extended_set(texts, lambda some: [[1.0] for _ in some], 2, 2, seed=0)
    assert {query.chunks for query in queries} == {(0, 1)}
