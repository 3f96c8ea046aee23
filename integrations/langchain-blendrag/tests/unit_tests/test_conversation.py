"""A conversation's id reaches the request by whatever way LangChain goes; only the engine is stood in for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.caches import InMemoryCache
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

from blendrag.errors import BlendragWarning
from langchain_blendrag import ChatBlend
from langchain_rig import WAYS

pytestmark = pytest.mark.filterwarnings(f"error::{BlendragWarning.__module__}.BlendragWarning")

Asked = list[str | None]
HI = [HumanMessage("Hi.")]
THREAD: Any = {"configurable": {"thread_id": "t1"}}


@pytest.fixture
def llm(make: Callable[..., ChatBlend]) -> ChatBlend:
    return make()


async def _drained(stream: Any) -> None:
    async for _ in stream:
        pass


EVERY_WAY: dict[str, Callable[..., Any]] = {
    **WAYS,
    "batch": lambda model, messages, *more, **options: model.batch([messages], *more, **options),
    "abatch": lambda model, messages, *more, **options: asyncio.run(
        model.abatch([messages], *more, **options)
    ),
    "events": lambda model, *given, **options: asyncio.run(
        _drained(model.astream_events(*given, version="v2", **options))
    ),
}
every_way = pytest.mark.parametrize("ask", EVERY_WAY.values(), ids=EVERY_WAY)


@every_way
def test_option_of_a_call_or_a_binding_is_the_conversation(ask: Any, llm: ChatBlend, asked: Asked) -> None:
    ask(llm, HI, conversation="c1")
    ask(llm.bind(conversation="c2"), HI)
    ask(llm.bind(conversation="c2"), HI, conversation="c3")
    ask(llm.bind(conversation="c2"), HI, THREAD)
    ask(llm, HI)
    assert asked == ["c1", "c2", "c3", "c2", None]


@every_way
def test_conversation_of_a_config_is_read(ask: Any, llm: ChatBlend, asked: Asked) -> None:
    ask(llm, HI, THREAD)
    ask(llm.with_config(THREAD), HI)
    ask(llm, HI, {"configurable": {"thread_id": 7}})
    ask(llm, HI, {"configurable": {"session_id": "s1"}})
    ask(llm, HI, {"metadata": {"conversation_id": "m1"}})
    ask(llm, HI, {"metadata": {"thread_id": "m2"}, "configurable": {"thread_id": "t2"}})
    ask(llm, HI, {"configurable": {"user_id": "u1"}})
    assert asked == ["t1", "t1", "7", "s1", "m1", "t2", None]


@every_way
def test_conversation_of_a_chain_reaches_the_model_in_it(ask: Any, llm: ChatBlend, asked: Asked) -> None:
    chain = RunnableLambda(lambda messages: messages) | llm | StrOutputParser()
    ask(chain, HI, THREAD)
    inner: Runnable[Any, Any] = RunnableLambda(lambda messages: llm.invoke(messages))  # no config handed on
    ask(inner, HI, THREAD)
    assert asked == ["t1", "t1"]


def test_each_prompt_of_a_batch_has_its_own_conversation(llm: ChatBlend, asked: Asked) -> None:
    configs: Any = [{"configurable": {"thread_id": name}} for name in "abc"]
    llm.batch([HI] * 3, configs)
    asyncio.run(llm.abatch([HI] * 3, configs))
    assert sorted(filter(None, asked)) == ["a", "a", "b", "b", "c", "c"]


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"12 degrees in {city}"


def test_tools_and_structured_output_keep_the_conversation(llm: ChatBlend, asked: Asked) -> None:
    tools = llm.bind_tools([weather])
    tools.invoke(HI, THREAD)
    tools.invoke(HI, conversation="c1")
    llm.bind_tools([weather], conversation="c2").invoke(HI)
    held = llm.with_structured_output({"title": "a", "type": "object", "properties": {}}, include_raw=True)
    held.invoke(HI, THREAD)
    llm.with_structured_output(method="json_mode", conversation="c3", include_raw=True).invoke(HI)
    assert asked == ["t1", "c1", "c2", "t1", "c3"]


@pytest.mark.parametrize("streamed", [False, True])
def test_turns_of_an_agent_are_in_its_thread(llm: ChatBlend, asked: Asked, streamed: bool) -> None:
    agent = create_agent(llm, [weather], checkpointer=InMemorySaver())
    question: Any = {"messages": [{"role": "user", "content": "Hi."}]}
    if streamed:
        list(agent.stream(question, THREAD, stream_mode="messages"))
    else:
        agent.invoke(question, THREAD)
    asyncio.run(agent.ainvoke(question, {"configurable": {"thread_id": "t2"}}))
    assert asked == ["t1", "t2"]


def test_session_of_a_message_history_is_the_conversation(llm: ChatBlend, asked: Asked) -> None:
    histories: dict[str, InMemoryChatMessageHistory] = {}
    prompt = ChatPromptTemplate.from_messages([("placeholder", "{history}"), ("human", "{question}")])
    chain = RunnableWithMessageHistory(
        prompt | llm,
        lambda session: histories.setdefault(session, InMemoryChatMessageHistory()),
        input_messages_key="question",
        history_messages_key="history",
    )
    for session in ("s1", "s2", "s1"):
        chain.invoke({"question": "Hi."}, {"configurable": {"session_id": session}})
    assert asked == ["s1", "s2", "s1"]


def test_response_cache_answers_all_conversations_alike(llm: ChatBlend, asked: Asked) -> None:
    llm.cache = InMemoryCache()
    answers = [llm.invoke(HI, conversation=name).text for name in ("a", "b")]
    assert asked == ["a"] and answers[0] == answers[1]


def test_class_behind_the_models_own_is_called_too(llm: ChatBlend, asked: Asked) -> None:
    class Noting(BaseChatModel):
        def invoke(self, *args: Any, **kwargs: Any) -> Any:
            return super().invoke(*args, **{**kwargs, "conversation": "noted"})

    class Noted(ChatBlend, Noting):
        pass

    Noted(kv_dir=llm.kv_dir).invoke(HI, THREAD)
    assert asked == ["noted"]
