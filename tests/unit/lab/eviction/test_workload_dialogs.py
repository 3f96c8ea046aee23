"""Traces made of dialogues."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.lab.eviction.readers import Dialog, DialogTurn
from blendrag.lab.eviction.trace import Request
from blendrag.lab.eviction.workloads import BLOCK, DialogLoad, dialog_trace

LOAD = DialogLoad(gap_s=10.0, active=4, seconds=400.0)


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
    for requests in by_conversation(list(dialog_trace(talks(60), LOAD, seed=seed).requests)).values():
        assert requests[-1].finished is not None
        spans.append((requests[0].at, requests[-1].finished))
    assert len(spans) > 20
    assert max(sum(a <= at < b for a, b in spans) for at, _ in spans) == LOAD.active


@pytest.mark.parametrize("seed", range(3))
def test_user_answers_only_when_the_answer_is_there(seed: int) -> None:
    for requests in by_conversation(list(dialog_trace(talks(60), LOAD, seed=seed).requests)).values():
        for before, after in pairwise(requests):
            assert before.finished is not None and before.at < before.finished < after.at


@given(st.lists(st.text(max_size=200), min_size=1, max_size=9), st.integers(0, 3 * BLOCK))
def test_history_is_the_beginning_of_the_next(texts: list[str], system: int) -> None:
    load = DialogLoad(gap_s=1.0, active=1, seconds=1e9, system_tokens=system, decode_s=0.0)
    requests = dialog_trace([talk("c", *texts)], load, tokens=len).requests
    assert len(requests) == (len(texts) + 1) // 2
    said = system
    for turn, request in enumerate(requests):
        prompt = said + len(texts[2 * turn])
        said = prompt + sum(map(len, texts[2 * turn + 1 : 2 * turn + 2]))
        assert len(request.keys) - request.answer == prompt // BLOCK
        assert len(request.keys) == len(request.sizes) == said // BLOCK
        assert request.prompts == tuple(texts[: 2 * turn + 1 : 2])
        assert request.continues == (turn + 1 < len(requests))
        if turn:
            assert request.keys[: len(requests[turn - 1].keys)] == requests[turn - 1].keys


def test_only_the_system_prompt_is_shared() -> None:
    load = DialogLoad(gap_s=1.0, active=9, seconds=1e9, system_tokens=40)
    trace = dialog_trace(talks(9), load)
    shared = set.intersection(*(set(r.keys) for r in trace.requests))
    assert shared == {"system:0", "system:1"}  # the third block of 16 has 8 tokens of the conversation's own
    conversations = by_conversation(list(trace.requests)).values()
    own = [{key for r in requests for key in r.keys} - shared for requests in conversations]
    assert sum(map(len, own)) == len(set.union(*own))


def test_one_seed_gives_one_trace() -> None:
    assert dialog_trace(talks(40), LOAD, seed=3).requests == dialog_trace(talks(40), LOAD, seed=3).requests


def test_two_seeds_give_two_traces() -> None:
    assert dialog_trace(talks(40), LOAD, seed=3).requests != dialog_trace(talks(40), LOAD, seed=4).requests


def test_gaps_have_the_stated_mean() -> None:
    load = DialogLoad(gap_s=100.0, active=50, seconds=1e9)
    dialogs = [talk(f"c{i}", *["hi"] * 41) for i in range(100)]
    requests = by_conversation(list(dialog_trace(dialogs, load).requests))
    gaps = [b.at - (a.finished or 0.0) for rs in requests.values() for a, b in pairwise(rs)]
    assert len(gaps) == 2000
    assert sum(gaps) / len(gaps) == pytest.approx(100.0, rel=0.1)  # 4.5 standard errors


def test_conversation_without_a_user_is_left_out() -> None:
    silent = Dialog(id="silent", turns=(DialogTurn(role="assistant", text="hello?"),))
    trace = dialog_trace([silent, talk("c", "hi")], LOAD)
    assert [request.conversation for request in trace.requests] == ["c"]
    assert dialog_trace([silent], LOAD).requests == []
