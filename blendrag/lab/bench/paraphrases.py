"""Questions whose documents come up again: several phrasings of each, shuffled (CacheBlend's extended sets,
section 7.1, there of 1,500 questions and three paraphrases by a larger model each)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Embed = Callable[[Sequence[str]], Sequence[Sequence[float]]]

PHRASINGS = (
    "What do the texts say about {}?",
    "I came across this and did not understand it: {} - explain it to me with the help of the texts.",
    "Summarise in one sentence whatever the documents above have to do with {}.",
    "A colleague asks about {}. Which of the texts should be read first?",
)
_SUBJECT = 8  # words of a chunk that a question is about


@dataclass(frozen=True, slots=True)
class Query:
    """One request. subject: the number of the question that it phrases; chunks: numbers of those that are
    retrieved for it, in the order of the prompt."""

    subject: int
    question: str
    chunks: tuple[int, ...]


def extended_set(
    texts: Sequence[str], embed: Embed, questions: int, chunks: int, seed: int, *, shuffled: bool = False
) -> list[Query]:
    """``questions`` in all phrasings, in random order, each with the ``chunks`` texts nearest to it.

    texts: of the chunks. embed: vectors of length 1. A question is about a few words of some chunk; every
    phrasing is retrieved for by itself, so that its chunks and their order may differ. shuffled: the chunks
    of a prompt in random order instead of the nearest first.
    """
    rng = random.Random(seed)
    subjects = [_subject(rng.choice(texts), rng) for _ in range(questions)]
    asked = [(number, way.format(words)) for number, words in enumerate(subjects) for way in PHRASINGS]
    rng.shuffle(asked)
    nearness = np.asarray(embed([text for _, text in asked])) @ np.asarray(embed(list(texts))).T
    queries = []
    for (number, text), row in zip(asked, nearness, strict=True):
        found = [int(at) for at in np.argsort(-row, kind="stable")[:chunks]]
        if shuffled:
            rng.shuffle(found)
        queries.append(Query(number, text, tuple(found)))
    return queries


def _subject(text: str, rng: random.Random) -> str:
    words = text.split()
    begin = rng.randrange(max(1, len(words) - _SUBJECT))
    return " ".join(words[begin : begin + _SUBJECT])
