"""The conversation that a call belongs to: its id, given by the caller or found in LangChain's config."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config

Method = TypeVar("Method", bound=Callable[..., Any])

# LangGraph's, RunnableWithMessageHistory's, and what else LangSmith groups runs by.
_NAMES = ("thread_id", "session_id", "conversation_id")


def _in_conversation(method: Method) -> Method:
    """Return a method of a model that is given the conversation of its config as an option."""

    @functools.wraps(method)
    def call(
        self: Any, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Any:
        return method(self, input, config, **with_conversation(config, kwargs))

    @functools.wraps(method)
    async def acall(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await call(self, *args, **kwargs)

    made: Any = acall if inspect.iscoroutinefunction(method) else call
    return made


class InConversation(BaseChatModel):
    """A chat model that turns the conversation of a call's config into the option ``conversation`` of that
    call.

    BaseChatModel tells ``_generate`` the metadata of its config only, and ``_stream`` nothing of it.
    """

    invoke = _in_conversation(BaseChatModel.invoke)
    ainvoke = _in_conversation(BaseChatModel.ainvoke)
    stream = _in_conversation(BaseChatModel.stream)
    astream = _in_conversation(BaseChatModel.astream)


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
