"""A conversation's id reaches the request by whatever way LlamaIndex goes; only the engine is a stand-in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.instrumentation.dispatcher import instrument_tags
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel

from llama_index.llms.blendrag import BlendLLM
from llamaindex_ways import every_way

Asked = list[str | None]
HELLO = [ChatMessage("Hello?")]


async def ask_all_ways(llm: BlendLLM, **options: Any) -> int:
    """How many requests that were."""
    llm.complete("Q: Hello?\nA:", formatted=True, **options)
    return 1 + len(await every_way(llm, "Hello?", **options))


async def test_option_and_field_arrive_on_every_way(llm: BlendLLM, asked: Asked) -> None:
    count = await ask_all_ways(llm, conversation="c1")
    assert asked == ["c1"] * count
    asked.clear()
    llm.conversation = "c2"
    await ask_all_ways(llm)
    assert asked == ["c2"] * count


async def test_no_conversation_is_made_up_where_none_is_named(llm: BlendLLM, asked: Asked) -> None:
    count = await ask_all_ways(llm)
    assert asked == [None] * count


@pytest.mark.parametrize("name", ["conversation", "session_id"])
async def test_tags_around_a_call_are_read(llm: BlendLLM, asked: Asked, name: str) -> None:
    with instrument_tags({name: 7}):
        count = await ask_all_ways(llm)
    assert asked == ["7"] * count


def test_call_wins_over_tags_and_tags_over_the_field(make_llm: Callable[..., BlendLLM], asked: Asked) -> None:
    llm = make_llm(conversation="field")
    with instrument_tags({"session_id": "tag", "user": "ada"}):
        llm.chat(HELLO)
        llm.chat(HELLO, conversation="call")
    with instrument_tags({"user": "ada"}):
        llm.chat(HELLO)
    assert asked == ["tag", "call", "field"]


def test_engine_sees_no_option_that_is_ours(llm: BlendLLM, scripted: Any) -> None:
    llm.chat(HELLO, conversation="c1")
    assert scripted.asked[0].sampling.other == {}


def weather(city: str) -> str:
    """The weather in a city."""
    return f"12 degrees in {city}"


class City(BaseModel):
    name: str


def test_tools_and_structured_output_keep_the_conversation(
    llm: BlendLLM, scripted: Any, asked: Asked
) -> None:
    tool = FunctionTool.from_defaults(weather)
    llm.chat_with_tools([tool], "Is it cold?", conversation="c1")
    scripted.answers = ['{"name": "Bergen"}']
    llm.structured_predict(City, PromptTemplate("Which city?"), {"conversation": "c2"})
    with instrument_tags({"session_id": "s1"}):
        llm.as_structured_llm(City).chat(HELLO)
    assert asked == ["c1", "c2", "s1"]


def test_chat_engine_and_agent_are_told_apart_by_tags(llm: BlendLLM, asked: Asked) -> None:
    engine = SimpleChatEngine.from_defaults(llm=llm)
    agent = FunctionAgent(tools=[FunctionTool.from_defaults(weather)], llm=llm, streaming=False)

    async def run() -> None:
        await agent.run("Hello?")

    with instrument_tags({"session_id": "s1"}):
        engine.chat("Hello?")
        list(engine.stream_chat("And now?").response_gen)
        asyncio.run(run())
    assert asked == ["s1"] * 3
