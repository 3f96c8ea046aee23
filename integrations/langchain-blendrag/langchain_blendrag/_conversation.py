"""The conversation that a call belongs to: its id, given by the caller or found in LangChain's config."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config

# LangGraph's, RunnableWithMessageHistory's, and what else LangSmith groups runs by.
_NAMES = ("thread_id", "session_id", "conversation_id")


class InConversation(BaseChatModel):
    """A chat model that turns the conversation of a call's config into the option ``conversation`` of that
    call.

    BaseChatModel tells ``_generate`` the metadata of its config only, and ``_stream`` nothing of it.
    """

    def invoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        return super().invoke(input, config, stop=stop, **with_conversation(config, kwargs))

    async def ainvoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        return await super().ainvoke(input, config, stop=stop, **with_conversation(config, kwargs))

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        return super().stream(input, config, stop=stop, **with_conversation(config, kwargs))

    def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        return super().astream(input, config, stop=stop, **with_conversation(config, kwargs))


def with_conversation(config: RunnableConfig | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return ``kwargs`` with the ``conversation`` of the config, or of the config around it (a chain's, a
    graph's), if they name none."""
    if kwargs.get("conversation") is not None:
        return kwargs
    around = ensure_config(config)
    for place in (around["configurable"], around["metadata"]):
        for name in _NAMES:
            if place.get(name) is not None:
                return {**kwargs, "conversation": place[name]}
    return kwargs
