"""From a call of ``ChatBlend`` to a request of blendrag's: fields, and what overrides them per call."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from langchain_core.messages import BaseMessage

from blendrag.errors import BlendragWarning, ConfigError
from langchain_blendrag._convert import document_texts, plain_messages

if TYPE_CHECKING:
    from blendrag.chat.request import ChatRequest
    from langchain_blendrag.chat_models import ChatBlend

_SAMPLING = ("temperature", "max_tokens", "top_p", "seed", "timeout", "logprobs", "top_logprobs")
_BLENDING = ("mode", "recompute_ratio", "selector")
# Sampling parameters that vLLM knows by the same name.
_OTHER = (
    "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens",
    "logit_bias", "ignore_eos",
)  # fmt: skip
_MORE = (
    "tools", "tool_choice", "response_format", "documents", "model", "stop", "max_retries", "conversation",
)  # fmt: skip
# What LangChain hands on for providers that need it.
_FOREIGN = (
    "strict", "stream", "streaming", "stream_usage", "stream_options", "parallel_tool_calls", "api_key",
)  # fmt: skip


def chat_request(
    llm: ChatBlend, messages: Sequence[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]
) -> ChatRequest:
    """``kwargs`` are those of ``invoke`` or ``bind``; they override the model's fields.

    Raises ConfigError for a value that cannot be used; a name that means nothing here is warned about.
    """
    from blendrag.chat.request import ChatRequest
    from blendrag.engine.client.generation import Grammar, Sampling

    if "max_completion_tokens" in kwargs:  # ChatOpenAI's other name for it
        kwargs = {"max_tokens": kwargs["max_completion_tokens"], **kwargs}
        del kwargs["max_completion_tokens"]
    _warn_about_unknown(kwargs)
    if kwargs.get("model") not in (None, llm.model):
        raise ConfigError(
            f"this ChatBlend runs {llm.model!r} and cannot answer as {kwargs['model']!r}: make another one"
        )
    value = {name: kwargs.get(name, getattr(llm, name)) for name in _SAMPLING}
    settings = llm.chat.settings
    schema, json_object = _answer_format(kwargs.get("response_format"))
    sampling = Sampling(
        max_tokens=value["max_tokens"] or settings.max_tokens,
        temperature=settings.temperature if value["temperature"] is None else value["temperature"],
        top_p=1.0 if value["top_p"] is None else value["top_p"],
        stop=tuple(stop or kwargs.get("stop") or llm.stop or ()),
        seed=value["seed"],
        logprobs=(value["top_logprobs"] or 1) if value["logprobs"] or value["top_logprobs"] else None,
        timeout_s=value["timeout"],
        grammar=Grammar("json_object", True) if json_object else None,
        other={**llm.model_kwargs, **{name: kwargs[name] for name in _OTHER if name in kwargs}},
    )
    options = settings.blending
    overridden = {name: kwargs[name] for name in _BLENDING if kwargs.get(name) is not None}
    if overridden:
        mode = overridden.pop("mode", llm.mode)
        options = replace(options, **overridden, blend=mode == "blend")
    conversation = kwargs.get("conversation")
    return ChatRequest(
        plain_messages(messages),
        sampling,
        documents=document_texts(messages, kwargs.get("documents") or ()),
        tools=tuple(kwargs.get("tools") or ()),
        tool_choice=kwargs.get("tool_choice") or "auto",
        schema=schema,
        options=options,
        max_retries=kwargs.get("max_retries", llm.max_retries),
        conversation=None if conversation is None else str(conversation),
    )


def _answer_format(response_format: Any) -> tuple[dict[str, Any] | None, bool]:
    """The schema asked for, and whether any JSON object will do."""
    match response_format:
        case None | {"type": "text"}:
            return None, False
        case {"type": "json_object"}:
            return None, True
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return schema, False
    raise ConfigError(f"response_format {response_format!r}: give a json_schema, json_object or text")


def _warn_about_unknown(kwargs: dict[str, Any]) -> None:
    known = (*_SAMPLING, *_BLENDING, *_OTHER, *_MORE, *_FOREIGN)
    for name in kwargs:
        if name not in known and not name.startswith("ls_"):
            close = difflib.get_close_matches(name, known, n=1)
            guess = f"; did you mean {close[0]!r}?" if close else ""
            warnings.warn(f"ignored {name!r}{guess}", BlendragWarning, stacklevel=3)
