"""Traces made of questions about paragraphs, and of dialogues."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.lab import questions
from blendrag.lab.eviction.source import BLOCK, dialog_trace, retrieval_trace
from blendrag.lab.eviction.trace import Dialog, DialogTurn, Request, RequestTrace
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


def test_trace_is_its_seed_s() -> None:
    one, again, other = (retrieval_trace(corpus(), LOAD, seed=seed) for seed in (2, 2, 3))
    assert one.requests == again.requests
    assert draws(one).most_common(3) != draws(other).most_common(3)


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


# -- traces made of dialogues ---------------------------------------------------------------------------

ACTIVE = 4


def some(dialogs: list[Dialog], seed: int = 0) -> RequestTrace:
    return dialog_trace(dialogs, seconds=400.0, gap_s=10.0, active=ACTIVE, seed=seed)


def talk(name: str, *texts: str) -> Dialog:
    turns = [DialogTurn(role=("user", "assistant")[i % 2], text=text) for i, text in enumerate(texts)]
    return Dialog(id=name, turns=tuple(turns))


def talks(count: int) -> list[Dialog]:
    return [talk(f"c{i}", *[f"{i} says {turn} " * 9 for turn in range(1 + i % 7)]) for i in range(count)]


def by_conversation(requests: list[Request]) -> dict[str, list[Request]]:
    found: dict[str, list[Request]] = {}
    for request in requests:
        assert request.conversation is not None
        found.setdefault(request.conversation, []).append(request)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_as_many_conversations_at_once_as_allowed(seed: int) -> None:
    spans = []
    for requests in by_conversation(list(some(talks(60), seed).requests)).values():
        spans.append((requests[0].at, requests[-1].finished))
    assert len(spans) > 20
    assert max(sum(a <= at < b for a, b in spans) for at, _ in spans) == ACTIVE


@pytest.mark.parametrize("seed", range(3))
def test_user_answers_only_when_the_answer_is_there(seed: int) -> None:
    for requests in by_conversation(list(some(talks(60), seed).requests)).values():
        for before, after in pairwise(requests):
            assert before.at < before.finished < after.at


@given(st.lists(st.text(max_size=200), min_size=1, max_size=9), st.integers(0, 3 * BLOCK))
def test_history_is_the_beginning_of_the_next(texts: list[str], system: int) -> None:
    dialogs = [talk("c", *texts)]
    requests = dialog_trace(dialogs, seconds=1e9, active=1, system_tokens=system, tokens=len).requests
    assert len(requests) == (len(texts) + 1) // 2
    said = system
    for turn, request in enumerate(requests):
        prompt = said + len(texts[2 * turn])
        said = prompt + sum(map(len, texts[2 * turn + 1 : 2 * turn + 2]))
        assert len(request.keys) - request.answer == prompt // BLOCK
        assert len(request.keys) == len(request.sizes) == said // BLOCK
        assert request.prompts == tuple(texts[: 2 * turn + 1 : 2])
        if turn:
            assert request.keys[: len(requests[turn - 1].keys)] == requests[turn - 1].keys


def test_only_the_system_prompt_is_shared() -> None:
    trace = dialog_trace(talks(9), seconds=1e9, system_tokens=40)
    shared = set.intersection(*(set(r.keys) for r in trace.requests))
    assert shared == {"system:0", "system:1"}  # the third block of 16 has 8 tokens of the conversation's own
    conversations = by_conversation(list(trace.requests)).values()
    own = [{key for r in requests for key in r.keys} - shared for requests in conversations]
    assert sum(map(len, own)) == len(set.union(*own))


def test_trace_of_dialogues_is_its_seed_s() -> None:
    one, again, other = (some(talks(40), seed).requests for seed in (3, 3, 4))
    assert one == again != other


def test_gaps_have_the_stated_mean() -> None:
    dialogs = [talk(f"c{i}", *["hi"] * 41) for i in range(100)]
    requests = by_conversation(list(dialog_trace(dialogs, seconds=1e9, active=50).requests))
    gaps = [b.at - a.finished for rs in requests.values() for a, b in pairwise(rs)]
    assert len(gaps) == 2000
    assert sum(gaps) / len(gaps) == pytest.approx(100.0, rel=0.1)  # 4.5 standard errors


def test_conversation_without_a_user_is_left_out() -> None:
    silent = Dialog(id="silent", turns=(DialogTurn(role="assistant", text="hello?"),))
    trace = some([silent, talk("c", "hi")])
    assert [request.conversation for request in trace.requests] == ["c"]
    assert some([silent]).requests == []
