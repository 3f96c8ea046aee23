"""From a call of ``ChatBlend`` to a request of blendrag's."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.messages import BaseMessage

from blendrag.errors import BlendragWarning, ConfigError
from blendrag.names import closest
from langchain_blendrag._convert import document_texts, plain_messages
from langchain_blendrag._tools import bound_tools

if TYPE_CHECKING:
    from blendrag import ChatModel, ChatRequest, Grammar

# What other providers' classes call the same.
SYNONYMS = {
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "openai_api_base": "base_url",
    "openai_api_key": "api_key",
    "request_timeout": "timeout",
    "stop_sequences": "stop",
}
# Options of a call by blendrag's own names; blendrag says what mode is called now.
_SAME = (
    "temperature", "max_tokens", "top_p", "seed", "timeout", "max_retries", "blend", "quality",
    "recompute_ratio", "selector", "kv_budget", "kv_allocator", "kv_scorer", "kv_alpha", "kv_window",
    "chat_template_kwargs", "conversation", "tools", "tool_choice", "parallel_tool_calls", "stop", "mode",
)  # fmt: skip
# Sampling parameters that vLLM knows by the same name.
SAMPLING = (
    "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens",
    "logit_bias", "ignore_eos",
)  # fmt: skip
_LAYERS = ("model_kwargs", "extra_body", "blendrag", "evidence")  # hold others, or ask for what always comes
_KNOWN = (
    *_SAME, *SAMPLING, *_LAYERS[:2], "documents", "logprobs", "model", "n", "reasoning_effort",
    "response_format", "structured_outputs", "top_logprobs",
)  # fmt: skip
# What changes no answer of ours: of another provider's accounts, caches and interfaces.
_WITHOUT_EFFECT = frozenset(
    {
        "api_key", "disabled_params", "openai_organization", "organization", "prompt_cache_key",
        "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier", "store",
        "stream", "stream_chunk_timeout", "stream_options", "stream_usage", "streaming", "strict",
        "tiktoken_model_name", "use_previous_response_id", "use_responses_api", "user",
    }
)  # fmt: skip


def by_our_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options, each by the name that it has here; one that is given by that name wins."""
    ours = {name: value for name, value in options.items() if name not in SYNONYMS}
    return {SYNONYMS[name]: options[name] for name in options if name in SYNONYMS} | ours


def warn_about(unknown: Iterable[str], known: Iterable[str], stacklevel: int) -> None:
    """Say of names without a meaning here that they are ignored, and what may have been meant."""
    for name in unknown:
        if name not in _WITHOUT_EFFECT and not name.startswith("ls_"):
            warnings.warn(f"ignored {name!r}{closest(name, known)}", BlendragWarning, stacklevel + 1)


def call_options(fields: Mapping[str, Any], call: Mapping[str, Any]) -> dict[str, Any]:
    """All options of one call by their names, of which ``other`` has what only vLLM may know.

    fields: the object's, which those of the call replace; None: not given. ``model_kwargs`` and
    ``extra_body`` hold more of them, the latter as vLLM's server reads it. Warns of a name without a meaning.
    """
    options: dict[str, Any] = {}
    variables: dict[str, Any] = {}
    other: dict[str, Any] = {}
    unknown: list[str] = []
    for given in (fields, call):
        body = given.get("extra_body") or {}
        for layer in (given, given.get("model_kwargs") or {}, body, body.get("blendrag") or {}):
            for name, value in by_our_names(layer).items():
                if value is None or name in _LAYERS:
                    continue
                if name == "chat_template_kwargs" and isinstance(value, Mapping):
                    variables |= value
                elif name == "reasoning_effort":
                    variables[name] = value
                elif name in _KNOWN:
                    options[name] = value
                elif layer is given:
                    unknown.append(name)
                else:
                    other[name] = value
    warn_about(unknown, _KNOWN, stacklevel=5)
    sampling = {name: options.pop(name) for name in SAMPLING if name in options}
    return {"chat_template_kwargs": variables, **options, "other": {**other, **sampling}}


def chat_request(
    chat: ChatModel, messages: Sequence[BaseMessage], stop: list[str] | None, options: dict[str, Any]
) -> ChatRequest:
    """``options`` are those of :func:`call_options`. Raises ConfigError for a value that cannot be used."""
    if (model := options.get("model")) and model != chat.model_name:
        raise ConfigError(
            f"this ChatBlend runs {chat.model_name!r} and cannot answer as {model!r}: make another one"
        )
    if options.get("tools"):
        options = {**options, **bound_tools(options["tools"], options.get("tool_choice"))}
    schema, grammar = _answer_format(options.get("response_format"), options.get("structured_outputs"))
    top_logprobs = options.get("top_logprobs")
    same: Any = {name: options[name] for name in (*_SAME, "other") if name in options}
    return chat.request(
        plain_messages(messages),
        **{**same, "stop": stop or same.get("stop")},
        documents=document_texts(messages, options.get("documents") or ()),
        logprobs=(top_logprobs or 1) if top_logprobs or options.get("logprobs") else None,
        schema=schema,
        grammar=grammar,
    )


def _answer_format(
    response_format: Any, structured_outputs: Any
) -> tuple[dict[str, Any] | None, Grammar | None]:
    """The schema asked for; or a grammar: of any JSON object, or the one that vLLM's field names."""
    from blendrag import Grammar

    match response_format, structured_outputs:
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}, None:
            return schema, None
        case {"type": "json_object"}, None:
            return None, Grammar("json_object", True)
        case None | {"type": "text"}, None:
            return None, None
        case None, {**named} if len(named) == 1:
            kind: Any
            ((kind, value),) = named.items()
            return None, Grammar(kind, value)
        case None, _:
            raise ConfigError(f"structured_outputs {structured_outputs!r}: give one grammar by its kind")
    raise ConfigError(f"response_format {response_format!r}: give a json_schema, json_object or text")
