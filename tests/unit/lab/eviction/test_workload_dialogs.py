"""Traces made of dialogues."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.lab.eviction.source import BLOCK, dialog_trace
from blendrag.lab.eviction.trace import Dialog, DialogTurn, Request, RequestTrace

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


def test_one_seed_gives_one_trace() -> None:
    assert some(talks(40), 3).requests == some(talks(40), 3).requests


def test_two_seeds_give_two_traces() -> None:
    assert some(talks(40), 3).requests != some(talks(40), 4).requests


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
