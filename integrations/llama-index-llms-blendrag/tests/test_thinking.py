"""What a model thinks stays apart from what it says, on every way that LlamaIndex goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatResponse, TextBlock, ThinkingBlock, ToolCallBlock
from llama_index.core.llms import ChatMessage

from llama_index.llms.blendrag import BlendLLM

SAID, THOUGHT, TEXT = "Let me see.\n</think>\n\nGood day.", "Let me see.\n", "Good day."
HI = [ChatMessage("Hi.")]
OFF = {"enable_thinking": False}


@pytest.fixture
def make(make_llm: Callable[..., BlendLLM], scripted: Any, thinking_dir: Path) -> Callable[..., BlendLLM]:
    scripted.answers, model = [SAID], str(thinking_dir)
    return lambda **options: make_llm(model=model, **options)


async def drained(llm: BlendLLM) -> list[ChatResponse]:
    return [response async for response in await llm.astream_chat(HI)]


def test_stream_has_thinking_apart_from_the_text_and_where_agents_look(make: Callable[..., BlendLLM]) -> None:
    llm = make()
    for responses in ([*llm.stream_chat(HI)], asyncio.run(drained(llm))):
        assert "".join(response.delta or "" for response in responses) == TEXT
        thought = [response.additional_kwargs.get("thinking_delta", "") for response in responses]
        assert "".join(thought) == THOUGHT and len(list(filter(None, thought))) > 1
        early = [response.message.blocks for response in responses if not response.message.content]
        assert early and all(isinstance(blocks[0], ThinkingBlock) for blocks in early)
        assert responses[-1].message.blocks == [ThinkingBlock(content=THOUGHT), TextBlock(text=TEXT)]


def test_whole_answer_has_thinking_apart_from_its_text(make: Callable[..., BlendLLM]) -> None:
    llm = make()
    for response in (llm.chat(HI), asyncio.run(llm.achat(HI))):
        assert response.message.content == TEXT
        assert response.message.blocks == [ThinkingBlock(content=THOUGHT), TextBlock(text=TEXT)]
    assert llm.complete("Hi.").text == TEXT
    assert [*llm.stream_complete("Hi.")][-1].text == TEXT


def test_model_that_does_not_think_has_no_thinking_blocks(llm: BlendLLM) -> None:
    for response in (llm.chat(HI), next(iter(llm.stream_chat(HI)))):
        assert [type(block) for block in response.message.blocks] == [TextBlock]
        assert "thinking_delta" not in response.additional_kwargs


def test_variables_of_the_template_arrive_on_every_way(make: Callable[..., BlendLLM], scripted: Any) -> None:
    llm = make()
    assert llm.render(HI).endswith("<think>\n")
    llm.chat(HI, chat_template_kwargs=OFF)
    llm.complete("Hi.", chat_template_kwargs=OFF)
    make(chat_template_kwargs=OFF).chat(HI)
    assert all(prompt.endswith("<think>\n\n</think>\n\n") for prompt in scripted.prompts())
    assert not any("chat_template_kwargs" in asked.sampling.other for asked in scripted.asked)


def test_what_was_thought_before_a_call_is_shown_until_the_next_question(
    make: Callable[..., BlendLLM],
) -> None:
    llm, call = make(), ToolCallBlock(tool_call_id="a", tool_name="clock", tool_kwargs={})
    said = ChatMessage(role="assistant", blocks=[ThinkingBlock(content="Look at the clock."), call])
    now = [ChatMessage("When?"), said, ChatMessage("Noon.", role="tool", tool_call_id="a")]
    assert "<think>\nLook at the clock.\n</think>" in llm.render(now)
    assert "Look at" not in llm.render([*now, ChatMessage("Sure?")])
