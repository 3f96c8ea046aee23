"""The answers of a server: the tokens that each door counts, and the evidence."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any
from unittest.mock import AsyncMock

import pytest
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from vllm.entrypoints.anthropic.api_router import create_messages
from vllm.entrypoints.openai.responses.api_router import create_responses

from blendrag.server.blending import Blended
from blendrag.server.completions import _Answers, body_of
from blendrag.server.doors import door_of
from engineless import CHAT, COMPLETION

RESPONSE, MESSAGE = body_of(create_responses), body_of(create_messages)
COUNTS = {"prompt": 9, "reused": 4, "recomputed": 2, "fresh": 2, "prefix": 1}
ROWS = {"documents": [{"source": "a"}]}


def usage_of(kind: type[BaseModel], cached: int) -> dict[str, Any]:
    """As vLLM counts it, of nine tokens of a prompt."""
    if kind is MESSAGE:
        created = {"cache_creation_input_tokens": 1, "cache_read_input_tokens": cached}
        return {"input_tokens": 8 - cached, "output_tokens": 2, **created}
    if kind is RESPONSE:
        return {"input_tokens": 9, "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0}}
    return {"prompt_tokens": 9, "total_tokens": 11, "prompt_tokens_details": {"cached_tokens": cached}}


KINDS = pytest.mark.parametrize("kind", [CHAT, COMPLETION, RESPONSE, MESSAGE], ids=lambda kind: kind.__name__)


def answers(kind: type[BaseModel], wanted: bool, counts: dict[str, Any]) -> tuple[_Answers, AsyncMock]:
    """Answers, and what gives their evidence."""
    evidence = AsyncMock(return_value=(counts, ROWS))
    return _Answers(door_of(kind), evidence, wanted, 1), evidence


def told(
    kind: type[BaseModel], answer: dict[str, Any], counts: dict[str, Any] = COUNTS
) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """An answer with its evidence, its header, and what the evidence was made of."""
    made, evidence = answers(kind, wanted=True, counts=counts)
    response = asyncio.run(made.told(JSONResponse(answer), Blended(plain="planned")))
    said = [call.args[0] for call in evidence.call_args_list]
    return json.loads(bytes(response.body)), json.loads(response.headers["x-blendrag"]), said


@KINDS
def test_usage_counts_what_was_not_computed(kind: type[BaseModel]) -> None:
    """vLLM counts all that our connector has brought, recomputed or not."""
    of_vllm = {"usage": usage_of(kind, 8), "kv_transfer_params": {"blendrag": "report"}}
    answer, header, said = told(kind, of_vllm)
    assert answer == {"usage": usage_of(kind, 5), "blendrag": COUNTS | ROWS} and header == COUNTS
    (of,) = said
    assert of["usage"]["prompt_tokens_details"]["cached_tokens"] == 8
    assert of["kv_transfer_params"] == {"blendrag": "report"}


@KINDS
def test_usage_of_a_prompt_that_was_not_planned_is_vllms(kind: type[BaseModel]) -> None:
    answer, header, _ = told(kind, {"usage": usage_of(kind, 8)}, counts={"plain": "no"})
    assert answer["usage"] == usage_of(kind, 8) and header == {"plain": "no"}


def test_response_that_is_computed_later_has_its_plan_in_the_header() -> None:
    answer, header, said = told(RESPONSE, {"status": "queued", "usage": None})
    assert (answer["usage"], header, said) == (None, {"plain": "planned"}, [])


def event(name: str, **data: Any) -> str:
    return f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n"


def stream_of(kind: type[BaseModel]) -> list[str]:
    """As vLLM has it, with a text that looks like what comes behind it."""
    usage, text = usage_of(kind, 8), 'event: message_delta event: response.completed "usage"'
    if kind is MESSAGE:
        started = event("message_start", message={"usage": {"input_tokens": 9, "output_tokens": 0}})
        delta = event("content_block_delta", delta={"text": text})
        return [started, delta, event("message_delta", delta={}, usage=usage), event("message_stop")]
    if kind is RESPONSE:
        delta = event("response.output_text.delta", delta=text)
        return [delta, event("response.completed", response={"id": "r", "usage": usage}, sequence_number=3)]
    delta = {"id": "c", "choices": [{"index": 0, "delta": {"content": text}}], "usage": None}
    last = {"id": "c", "choices": [], "usage": usage}
    return [f"data: {json.dumps(delta)}\n\n", f"data: {json.dumps(last)}\n\n", "data: [DONE]\n\n"]


def streamed(kind: type[BaseModel], chunks: list[str], wanted: bool) -> tuple[list[str], int]:
    """What comes of a stream, and how often the evidence was asked for."""
    made, evidence = answers(kind, wanted, COUNTS)

    async def all_of() -> list[str]:
        response = await made.told(StreamingResponse(iter(chunks)), Blended(plain="planned"))
        assert json.loads(response.headers["x-blendrag"]) == {"plain": "planned"}
        return [str(chunk) async for chunk in response.body_iterator]  # type: ignore[attr-defined]

    return asyncio.run(all_of()), evidence.call_count


@pytest.mark.parametrize("wanted", [False, True])
@KINDS
def test_stream_counts_what_was_not_computed(kind: type[BaseModel], wanted: bool) -> None:
    chunks = stream_of(kind)
    came, times = streamed(kind, chunks, wanted)
    assert times == 1
    own = wanted and kind in (CHAT, COMPLETION)  # a chunk of ours
    assert len(came) == len(chunks) + own
    changed = [(before, after) for before, after in zip(chunks, came, strict=False) if before != after]
    before, after = changed[0]
    assert json.dumps(usage_of(kind, 5)) in after and json.dumps(usage_of(kind, 8)) in before
    assert before.partition("data: ")[0] == after.partition("data: ")[0]
    assert sum('"blendrag"' in chunk for chunk in came) == wanted


@pytest.mark.parametrize("kind", [CHAT, COMPLETION])
def test_stream_whose_client_does_not_count_is_told_of_at_its_end(kind: type[BaseModel]) -> None:
    first, _, done = stream_of(kind)
    came, times = streamed(kind, [first, done], wanted=True)
    assert (len(came), times) == (3, 1) and '"blendrag"' in came[1] and came[2] == done


@pytest.mark.parametrize("cancelled", [False, True])
@KINDS
def test_stream_that_its_client_breaks_off_is_counted_once_it_was_begun(
    kind: type[BaseModel], cancelled: bool
) -> None:
    async def broken_off(after: int) -> int:
        made, evidence = answers(kind, True, COUNTS)

        async def chunks() -> Any:
            for number in range(after):
                yield event("some", number=number)
            await asyncio.sleep(60)

        response = await made.told(StreamingResponse(chunks()), Blended(plain="planned"))
        stream: Any = response.body_iterator  # type: ignore[attr-defined]
        for _ in range(after):
            await anext(stream)
        if cancelled:
            waiting = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            assert waiting.cancelled()
        else:
            await stream.aclose()
        return evidence.call_count

    ahead = door_of(kind).ahead
    assert [asyncio.run(broken_off(after)) for after in (ahead, ahead + 1)] == [0, 1]


@pytest.mark.parametrize(
    ("kind", "ending"),
    [
        (CHAT, ["data: {}\n\n", 'data: {"error": {"message": "x"}}\n\n', "data: [DONE]\n\n"]),
        (MESSAGE, [event("message_start"), event("error", error={"message": "x"})]),
        (RESPONSE, [event("response.created"), event("response.in_progress"), event("response.failed")]),
        *((kind, [event("some"), event("some"), event("some"), RuntimeError("died")])
          for kind in (CHAT, COMPLETION, RESPONSE, MESSAGE)),
    ],
)  # fmt: skip
def test_stream_that_fails_is_not_counted_as_answered(kind: type[BaseModel], ending: list[Any]) -> None:
    async def failed() -> tuple[list[Any], int]:
        made, evidence = answers(kind, True, COUNTS)

        async def chunks() -> Any:
            for chunk in ending:
                if isinstance(chunk, Exception):
                    raise chunk
                yield chunk

        came = []
        response: Any = await made.told(StreamingResponse(chunks()), Blended(plain="planned"))
        with contextlib.suppress(RuntimeError):
            async for chunk in response.body_iterator:
                came.append(chunk)
        return came, evidence.call_count

    assert asyncio.run(failed()) == ([chunk for chunk in ending if isinstance(chunk, str)], 0)


@KINDS
def test_stream_that_is_broken_off_while_it_is_counted_is_counted_once(kind: type[BaseModel]) -> None:
    async def counted() -> list[str]:
        steps = []

        async def evidence(_: Any) -> Any:
            steps.append("begun")
            await asyncio.sleep(0.01)
            steps.append("ended")
            return COUNTS, ROWS

        made = _Answers(door_of(kind), evidence, True, 1)
        response: Any = await made.told(StreamingResponse(iter(stream_of(kind))), Blended(plain="planned"))

        async def read_all() -> None:
            async for _ in response.body_iterator:
                pass

        reading = asyncio.create_task(read_all())
        while not steps:
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
        assert reading.cancelled()
        await asyncio.sleep(0.02)
        return steps

    assert asyncio.run(counted()) == ["begun", "ended"]


@KINDS
def test_stream_whose_client_goes_away_is_counted_behind_starlette(kind: type[BaseModel]) -> None:
    """It cancels the task that reads the stream, or leaves the stream where a send fails."""

    async def broken_off(version: str) -> int:
        made, evidence = answers(kind, True, COUNTS)
        sent = 0

        async def chunks() -> Any:
            while True:
                yield event("some")
                await asyncio.sleep(0)

        async def send(message: Any) -> None:
            nonlocal sent
            sent += 1
            if sent > 5 and version == "2.4":
                raise OSError

        async def receive() -> Any:
            while sent < 5:
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        response = await made.told(StreamingResponse(chunks()), Blended(plain="planned"))
        with contextlib.suppress(ClientDisconnect):
            await response({"type": "http", "asgi": {"spec_version": version}}, receive, send)
        del response
        await asyncio.sleep(0.01)
        return evidence.call_count

    assert [asyncio.run(broken_off(version)) for version in ("2.3", "2.4")] == [1, 1]
