"""When answers are begun before they are asked for, and what becomes of them."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.chat import speculation
from blendrag.chat.request import ChatRequest
from blendrag.chat.speculation import Speculation, Speculations, in_thread
from blendrag.errors import PromptTooLongError

TTFT_S = 1.0
PROMPT, OTHER = ChatRequest("a prompt"), ChatRequest("another one")


class Answering:
    """A turn without an engine."""

    speculation, running, failed, cancelled = "none", True, False, False
    on_first_token: Callable[[float], None]

    def adopt(self) -> None:
        self.speculation = "adopted"

    def cancel(self) -> None:
        self.cancelled = True


class Told:
    """A chat of which only the speculations are real, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.begun, self.freed = 0.0, list[Answering](), False
        monkeypatch.setattr(speculation, "time", SimpleNamespace(perf_counter=lambda: self.now))
        self.all = Speculations()

    def expect(self, request: ChatRequest = PROMPT) -> Speculation:
        def begin(request: ChatRequest, freed: bool) -> Any:
            self.begun.append(Answering())
            self.freed = freed
            return self.begun[-1]

        return self.all.expect(request, begin)

    def ask(self, request: ChatRequest = PROMPT, wait_s: float = TTFT_S) -> Any:
        self.now += wait_s
        turn: Any = self.all.turn(request, lambda _: Answering())  # type: ignore[arg-type,return-value]
        if hasattr(turn, "on_first_token"):
            turn.on_first_token(TTFT_S)
        return turn

    def trusted(self) -> Told:
        """Prompts that were expected have come."""
        self.expect()
        self.ask()
        return self


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(monkeypatch)


def test_answer_is_begun_once_a_list_has_come_true(told: Told) -> None:
    assert not told.expect().begun
    assert told.ask().speculation == "none"
    assert told.expect().begun
    assert told.ask().speculation == "adopted"
    assert told.ask().speculation == "none", "nothing is adopted twice"


def test_reranker_that_changes_every_order_costs_no_answer(told: Told) -> None:
    for _ in range(20):
        told.expect(OTHER).end()
        told.ask(PROMPT)
    assert not told.begun


def test_lists_that_stop_coming_true_are_soon_not_begun(told: Told) -> None:
    told.trusted()
    for _ in range(50):
        told.expect(OTHER)
        told.ask(PROMPT)
    assert 0 < len(told.begun) < 5
    for _ in range(10):
        told.expect()
        told.ask()
    assert told.begun[-1].speculation == "adopted", "nor is one that comes true again forgotten"


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 3.0)), min_size=1, max_size=60))
def test_begun_answers_cost_no_more_than_they_have_saved_and_one_prefill(
    trials: list[tuple[bool, float]],
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        told, saved, observed = Told(patched), 0.0, 0.0
        for came, wait_s in trials:
            begun = told.expect(PROMPT if came else OTHER).begun
            told.ask(PROMPT, wait_s)
            worth = min(wait_s, TTFT_S) if came else -max(0.0, TTFT_S - wait_s)
            observed += max(worth, 0.0)
            saved += worth if begun else 0.0
        assert saved >= -observed - TTFT_S


def test_short_wait_is_not_worth_a_prefill_that_cannot_be_interrupted(told: Told) -> None:
    for at in range(40):
        came = at % 2 == 0
        told.expect(PROMPT if came else OTHER)
        told.ask(PROMPT, wait_s=0.05)
    assert len(told.begun) < 10


def test_new_list_ends_the_old_answer_and_the_same_list_keeps_it(told: Told) -> None:
    first = told.trusted().expect()
    assert told.expect() is first and not told.begun[0].cancelled
    second = told.expect(OTHER)
    assert told.begun[0].cancelled and not first.begun and second.begun
    first.end()
    assert second.begun, "an end that comes late is its own"
    assert told.ask(OTHER).speculation == "adopted"


def test_other_prompt_stops_the_answer(told: Told) -> None:
    told.trusted().expect()
    assert told.ask(OTHER).speculation == "discarded"
    assert told.begun[0].cancelled


def test_end_leaves_an_answer_that_was_adopted(told: Told) -> None:
    expected = told.trusted().expect()
    turn = told.ask()
    expected.end()
    assert turn.speculation == "adopted" and not turn.cancelled


def test_answer_that_was_ended_or_failed_is_discarded(told: Told) -> None:
    told.trusted().expect().end()
    assert told.ask().speculation == "discarded"
    told.expect()
    told.begun[-1].failed = True
    assert told.ask().speculation == "discarded"


def test_closed_chat_stops_its_answer(told: Told) -> None:
    told.trusted().expect()
    told.all.end()
    assert told.begun[0].cancelled
    assert told.ask().speculation == "none"


def test_prompt_that_cannot_be_begun_does_not_fail_before_it_is_asked(told: Told) -> None:
    def begin(request: ChatRequest, freed: bool) -> Any:
        raise PromptTooLongError("too long")

    told.trusted()
    assert not told.all.expect(PROMPT, begin).begun


def test_no_answer_is_begun_on_an_engine_that_others_have_to_themselves(told: Told) -> None:
    """What was freed is only what an answer had that was running until then."""
    told.trusted().expect()
    assert not told.freed, "there was none before"
    told.expect(OTHER)
    assert told.freed
    told.begun[-1].running = False
    told.expect()
    assert not told.freed, "it was over long ago"
    told.expect(OTHER).end()
    told.expect()
    assert not told.freed, "so was this one"


def elsewhere(work: Callable[[], object]) -> None:
    """Another thread does this, and waits for nobody."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("way", ["asked", "begun"])
def test_chat_can_be_closed_while_a_prompt_is_planned_or_an_engine_starts(told: Told, way: str) -> None:
    planned: list[str] = []

    def make(request: ChatRequest) -> Any:
        elsewhere(told.all.end)
        elsewhere(lambda: told.all.turn(OTHER, lambda _: planned.append("another")))  # type: ignore[arg-type,func-returns-value]
        planned.append("one")
        return Answering()

    if way == "asked":
        told.all.turn(PROMPT, make)
    else:
        begun = told.trusted().all.expect(PROMPT, lambda request, _: make(request))
        assert not begun.begun and begun.turn is not None and begun.turn.cancelled  # type: ignore[attr-defined]
    assert planned == ["another", "one"]


def test_messages_changed_in_place_do_not_get_the_answer_to_the_old_ones(told: Told) -> None:
    told.trusted()
    messages = [{"role": "user", "content": "Is it open?"}]
    told.expect(ChatRequest(messages))
    messages[0]["content"] = "Is it closed?"
    assert told.ask(ChatRequest(messages)).speculation == "discarded"


def test_copy_of_a_chat_has_a_speculation_of_its_own(told: Told) -> None:
    told.trusted().expect()
    for other in (copy.deepcopy(told.all), pickle.loads(pickle.dumps(told.all))):
        turn = other.turn(PROMPT, lambda _: Answering())
        assert turn.speculation == "none"
    assert told.ask().speculation == "adopted"


async def test_cancelled_wait_undoes_what_a_thread_brings_later() -> None:
    goes_on, undone = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(
        in_thread(lambda: goes_on.wait(60), lambda _: loop.call_soon_threadsafe(undone.set))
    )
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not undone.is_set()
    goes_on.set()
    await asyncio.wait_for(undone.wait(), 60)
