"""Requests of blendrag's, made of calls of ``ChatBlend``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.messages import BaseMessage

from blendrag import foreign
from blendrag.errors import ConfigError
from langchain_blendrag._convert import document_texts, plain_messages
from langchain_blendrag._tools import answer_format, bound_tools

if TYPE_CHECKING:
    from blendrag import ChatModel, ChatRequest

SYNONYMS = {
    **foreign.ALIASES,
    "model_name": "model",
    "openai_api_base": "base_url",
    "openai_api_key": "api_key",
}
"""Other providers' names of options."""


def without_tracing(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options but those that LangChain hands on for LangSmith."""
    return {name: value for name, value in options.items() if not name.startswith("ls_")}


def chat_request(
    chat: ChatModel, messages: Sequence[BaseMessage], stop: list[str] | None, options: dict[str, Any]
) -> ChatRequest:
    """Make a request. ``options`` are those of :func:`call_options`. Raises ConfigError for a value that
    cannot be used."""
    if (model := options.get("model")) and model != chat.model_name:
        raise ConfigError(
            f"this ChatBlend runs {chat.model_name!r} and cannot answer as {model!r}: make another one"
        )
    if options.get("tools"):
        options = {**options, **bound_tools(options["tools"], options.get("tool_choice"))}
    if (wanted := options.get("response_format")) is not None:
        options = {**options, "response_format": answer_format(wanted)}
    asked = foreign.request_options(options)
    asked["stop"] = stop or asked.get("stop")
    asked["documents"] = document_texts(messages, options.get("documents") or ())
    return chat.request(plain_messages(messages), **asked)
