"""Options by the names that clients of OpenAI's, vLLM's and others have for them, and what they mean here."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from blendrag.chat.request import RequestOptions
from blendrag.engine.client.generation import Grammar
from blendrag.errors import BlendragWarning, ConfigError
from blendrag.names import closest
from blendrag.settings import RENAMED

ALIASES = {
    "allow_parallel_tool_calls": "parallel_tool_calls",
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "request_timeout": "timeout",
    "stop_sequences": "stop",
}
"""Other names of options, of requests and of the classes that make them."""

# Parameters of sampling that vLLM knows by the same name.
_SAMPLING = frozenset(
    {
        "allowed_token_ids", "bad_words", "extra_args", "frequency_penalty", "ignore_eos",
        "include_stop_str_in_output", "logit_bias", "min_p", "min_tokens", "presence_penalty",
        "prompt_logprobs", "repetition_detection", "repetition_penalty", "skip_special_tokens",
        "spaces_between_special_tokens", "stop_token_ids", "thinking_token_budget", "top_k",
    }
)  # fmt: skip
# Whose values are more options, by name.
_NESTED = ("additional_kwargs", "extra_body", "model_kwargs")
_MEANT = ("best_of", "n", "reasoning_effort", "response_format", "top_logprobs")
# What other providers need, and what holds here anyway.
_HARMLESS = frozenset(
    {
        "api_version", "audio_config", "download_dir", "is_chat_model", "metadata", "modalities",
        "prompt_cache_key", "reuse_client", "safety_identifier", "service_tier",
        "should_use_structured_outputs", "store", "stream", "stream_options", "stream_usage", "streaming",
        "strict", "tokenizer", "trust_remote_code", "user", "verbose",
    }
)  # fmt: skip
_OURS = (*RequestOptions.__annotations__, *RENAMED)  # a request says what they are called now
TAKEN = frozenset({*_OURS, *ALIASES, *_SAMPLING, *_NESTED, *_MEANT, *_HARMLESS})
"""Names that :func:`request_options` does not warn about."""


def request_options(*options: Mapping[str, Any]) -> RequestOptions:
    """Return the options of a request that mean what ``options`` do, of which the last count most.

    A name that means nothing here is left out with a BlendragWarning. Raises ConfigError for a value that
    cannot be used.
    """
    given: dict[str, Any] = {name: value for some in options for name, value in _flat(some)}
    meant = {name: given[name] for name in _OURS if name in given}
    sampling = {name: given[name] for name in sorted(_SAMPLING) if name in given}
    meant["other"] = {**sampling, **(given.get("other") or {})}
    meant["logprobs"] = _logprobs(given.get("logprobs"), given.get("top_logprobs"))
    if isinstance(choice := given.get("tool_choice"), Mapping):  # as OpenAI writes it
        meant["tool_choice"] = choice["function"]["name"]
    if "response_format" in given:
        meant |= _answer_format(given["response_format"])
    if (effort := given.get("reasoning_effort")) is not None:  # as vLLM's server tells templates of it
        thinking = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        meant["chat_template_kwargs"] = {**thinking, **(given.get("chat_template_kwargs") or {})}
    for name in ("n", "best_of"):
        if given.get(name) not in (None, 1):
            warnings.warn(f"{name}={given[name]!r}: one answer is given", BlendragWarning, stacklevel=2)
    warn_about(given, TAKEN)
    asked: Any = {name: value for name, value in meant.items() if value is not None}
    return asked


def warn_about(names: Iterable[str], known: Iterable[str]) -> None:
    """Give a BlendragWarning for each of ``names`` that is not known, with those that may be meant."""
    known = set(known)
    for name in names:
        if name not in known:
            warnings.warn(f"ignored {name!r}{closest(name, known)}", BlendragWarning, stacklevel=3)


def _flat(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        if name in _NESTED:
            yield from _flat(value or {})
        elif value is not None:
            yield ALIASES.get(name, name), value


def _logprobs(wanted: bool | int | None, top: int | None) -> int | None:
    """How many for each token, where some say whether, and how many beside."""
    if wanted is False or (wanted is None and not top):
        return None
    return top or int(wanted or 1)


def _answer_format(response_format: Any) -> dict[str, Any]:
    """The schema asked for; or the grammar of any JSON object."""
    match response_format:
        case {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"grammar": Grammar("json_object", True)}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"schema": schema}
    raise ConfigError(f"response_format {response_format!r}: give a json_schema, json_object or text")
