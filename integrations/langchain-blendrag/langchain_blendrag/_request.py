"""From a call of ``ChatBlend`` to a request of blendrag's."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.messages import BaseMessage

from blendrag.errors import BlendragWarning, ConfigError
from langchain_blendrag._convert import document_texts, plain_messages

if TYPE_CHECKING:
    from blendrag import ChatModel, ChatRequest, Grammar

# Options of a call by blendrag's own names; blendrag says what mode is called now.
_SAME = (
    "temperature", "max_tokens", "top_p", "seed", "timeout", "max_retries", "blend", "quality",
    "recompute_ratio", "selector", "kv_budget", "kv_allocator", "kv_scorer", "kv_alpha", "kv_window",
    "chat_template_kwargs", "conversation", "tools", "tool_choice", "mode",
)  # fmt: skip
# Sampling parameters that vLLM knows by the same name.
_OTHER = (
    "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens",
    "logit_bias", "ignore_eos",
)  # fmt: skip
_MORE = ("response_format", "documents", "model", "stop", "logprobs", "top_logprobs", "model_kwargs")
# What LangChain hands on for providers that need it.
_FOREIGN = (
    "strict", "stream", "streaming", "stream_usage", "stream_options", "parallel_tool_calls", "api_key",
)  # fmt: skip


def chat_request(
    chat: ChatModel, messages: Sequence[BaseMessage], stop: list[str] | None, options: dict[str, Any]
) -> ChatRequest:
    """``options`` are the model's fields, and what ``invoke`` or ``bind`` put in their place.

    Raises ConfigError for a value that cannot be used; a name that means nothing here is warned about.
    """
    if "max_completion_tokens" in options:  # ChatOpenAI's other name for it
        options = {**options, "max_tokens": options["max_completion_tokens"]}
        del options["max_completion_tokens"]
    _warn_about_unknown(options)
    if (model := options.get("model")) and model != chat.model_name:
        raise ConfigError(
            f"this ChatBlend runs {chat.model_name!r} and cannot answer as {model!r}: make another one"
        )
    schema, grammar = _answer_format(options.get("response_format"))
    top_logprobs = options.get("top_logprobs")
    same: Any = {name: options[name] for name in _SAME if name in options}
    return chat.request(
        plain_messages(messages),
        **same,
        documents=document_texts(messages, options.get("documents") or ()),
        stop=stop or options.get("stop"),
        logprobs=(top_logprobs or 1) if top_logprobs or options.get("logprobs") else None,
        schema=schema,
        grammar=grammar,
        other={
            **options.get("model_kwargs", {}),
            **{name: options[name] for name in _OTHER if name in options},
        },
    )


def _answer_format(response_format: Any) -> tuple[dict[str, Any] | None, Grammar | None]:
    """The schema asked for; or the grammar of any JSON object."""
    match response_format:
        case None | {"type": "text"}:
            return None, None
        case {"type": "json_object"}:
            from blendrag import Grammar

            return None, Grammar("json_object", True)
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return schema, None
    raise ConfigError(f"response_format {response_format!r}: give a json_schema, json_object or text")


def _warn_about_unknown(options: dict[str, Any]) -> None:
    known = (*_SAME, *_OTHER, *_MORE, *_FOREIGN)
    for name in options:
        if name not in known and not name.startswith("ls_"):
            close = difflib.get_close_matches(name, known, n=1)
            guess = f"; did you mean {close[0]!r}?" if close else ""
            warnings.warn(f"ignored {name!r}{guess}", BlendragWarning, stacklevel=4)
