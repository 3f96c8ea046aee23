"""Answers begun before they are asked for, on the real engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blendrag import Answer, Chat, ChatRequest, Settings
from blendrag.engine.client.engine import Engine
from blendrag.serving import forecaster
from waiting import until
from workbench import Bench

pytestmark = pytest.mark.engine

QUESTION = "What are these about?"


Stored = tuple[Settings, Path]


@pytest.fixture(scope="module")
def stored(
    bench: Bench, engine_options: dict[str, Any], texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Stored:
    settings = Settings.load(**{**engine_options, "max_tokens": 24}, min_cached_tokens=16)
    filled = Chat(settings, tmp_path_factory.mktemp("stored") / "kv")
    filled.collection("kb").add({str(at): text for at, text in enumerate(texts)})
    filled.close()
    return settings, filled.kv_dir


@pytest.fixture
def chat(stored: Stored) -> Iterator[Chat]:
    """One that has begun no answer yet."""
    settings, kv_dir = stored
    made = Chat(settings.model_copy(update={"outcome_log": True}), kv_dir)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _own_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecaster, "fitted_file", lambda cache_dir: tmp_path / "fitted.safetensors")
    monkeypatch.setattr(forecaster, "log_file", lambda cache_dir: tmp_path / "prompts.sqlite")


def prompt(chat: Chat, *texts: str, **options: Any) -> ChatRequest:
    return chat.request([{"role": "user", "content": "\n\n".join((*texts, QUESTION))}], **options)


def trusted(chat: Chat, *texts: str) -> None:
    """Have a prompt come that was expected: from now on, answers are begun."""
    request = prompt(chat, *texts, max_tokens=1)
    assert not chat.speculate(request).begun
    time.sleep(0.02)
    assert chat.complete(request).evidence.speculation == "none"


def whole(chat: Chat, request: ChatRequest) -> Answer:
    return chat.complete(request)


def streamed(chat: Chat, request: ChatRequest) -> Answer:
    pieces = list(chat.stream(request))
    assert len(pieces) > 4
    answer = pieces[-1].answer
    assert answer is not None and "".join(piece.text for piece in pieces) == answer.text
    return answer


def awaited(chat: Chat, request: ChatRequest) -> Answer:
    return asyncio.run(chat.acomplete(request))


@pytest.mark.parametrize("way", [whole, streamed, awaited])
@pytest.mark.parametrize("ahead", ["begun", "done"])
@pytest.mark.parametrize("blend", [True, False])
def test_adopted_answer_is_the_one_that_was_asked_for(
    chat: Chat,
    bench: Bench,
    texts: list[str],
    engine: Engine,
    way: Callable[[Chat, ChatRequest], Answer],
    ahead: str,
    blend: bool,
) -> None:
    trusted(chat, texts[3])
    request = prompt(chat, *texts[:3], blend=blend, logprobs=2)
    bench.reset()
    fresh = way(chat, request)
    bench.reset()
    assert chat.speculate(request).begun
    if ahead == "done":
        until(lambda: engine.idle)
    adopted = way(chat, prompt(chat, *texts[:3], blend=blend, logprobs=2))
    assert adopted.evidence.speculation == "adopted"
    assert (adopted.text, adopted.usage, adopted.finish_reason) == (
        fresh.text,
        fresh.usage,
        fresh.finish_reason,
    )
    assert [one.token for one in adopted.logprobs] == [one.token for one in fresh.logprobs]
    for counted in ("prompt", "mode", "reused", "recomputed", "fresh", "prefix", "plain", "documents"):
        assert getattr(adopted.evidence, counted) == getattr(fresh.evidence, counted)
    assert adopted.ttft_s <= adopted.total_s
    bench.reset()


def test_answer_that_nobody_asked_for_gives_its_blocks_back(
    chat: Chat, bench: Bench, texts: list[str]
) -> None:
    trusted(chat, texts[3])
    endless = {"max_tokens": 2000, "other": {"ignore_eos": True}}
    assert chat.speculate(prompt(chat, *texts[:3], **endless)).begun
    second = chat.speculate(prompt(chat, *texts[1:4], **endless))
    assert second.begun, "in the place of the first"
    assert chat.complete(prompt(chat, texts[0])).evidence.speculation == "discarded"
    assert not second.begun
    bench.reset()


def test_ended_or_closed_answer_gives_its_blocks_back(chat: Chat, bench: Bench, texts: list[str]) -> None:
    trusted(chat, texts[3])
    request = prompt(chat, *texts[:3], max_tokens=2000, other={"ignore_eos": True})
    expected = chat.speculate(request)
    assert expected.begun
    expected.end()
    bench.reset()

    assert chat.speculate(request).begun
    stream = chat.stream(request)
    next(stream)
    stream.close()
    bench.reset()

    assert chat.speculate(request).begun
    chat.close()
    bench.reset()


async def test_cancelled_call_stops_an_adopted_answer(chat: Chat, bench: Bench, texts: list[str]) -> None:
    await asyncio.to_thread(trusted, chat, texts[3])
    request = prompt(chat, *texts[:3], max_tokens=2000, other={"ignore_eos": True})
    for wait_s in (0.0, 0.2):
        assert (await chat.aspeculate(request)).begun
        task = asyncio.create_task(chat.acomplete(request))
        await asyncio.sleep(wait_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        chat.speculate(prompt(chat, "")).end()  # what the call had no time to adopt
        await asyncio.to_thread(bench.reset)


def test_no_answer_is_begun_beside_others_requests(chat: Chat, bench: Bench, texts: list[str]) -> None:
    trusted(chat, texts[3])
    other = chat.stream(prompt(chat, texts[1], max_tokens=2000, other={"ignore_eos": True}))
    next(other)
    assert not chat.speculate(prompt(chat, *texts[:3])).begun
    other.close()
    bench.reset()


def test_adopted_answer_is_counted_once_and_a_discarded_one_too(chat: Chat, texts: list[str]) -> None:
    def asked() -> int:
        return int(chat.library.eviction()["forecasts"]["asked"])

    trusted(chat, texts[3])
    before = asked()
    request = prompt(chat, *texts[:3])
    assert chat.speculate(request).begun
    assert chat.complete(request).evidence.speculation == "adopted"
    assert asked() == before + 1
    assert chat.speculate(request).begun
    chat.complete(prompt(chat, texts[5]))
    assert asked() == before + 2
