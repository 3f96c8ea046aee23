"""Options of calls, and texts of files, as clients of OpenAI's, vLLM's and others send them."""

from __future__ import annotations

import contextlib
import re
import warnings
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

from blendrag.chat.request import AUTO, NONE, REQUIRED, RequestOptions
from blendrag.engine.client.generation import Grammar
from blendrag.errors import BlendragWarning, ConfigError
from blendrag.former import ENGINE_ARGUMENTS
from blendrag.former import FORMER as _MOVED
from blendrag.names import closest
from blendrag.settings import RENAMED
from blendrag.settings import ModelName as ModelName

ALIASES = {
    "allow_parallel_tool_calls": "parallel_tool_calls",
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "request_timeout": "timeout",
    "stop_sequences": "stop",
}
"""Other names of options."""

_MEANT = ("reasoning_effort", "response_format", "structured_outputs", "top_logprobs")
# Options whose values are more options, by name; the last count most.
_NESTED = ("additional_kwargs", "other", "model_kwargs", "extra_body", "blendrag")
# Parameters of sampling that vLLM knows by the same name.
_SAMPLING = frozenset(
    {
        "allowed_token_ids", "bad_words", "extra_args", "frequency_penalty", "ignore_eos",
        "include_stop_str_in_output", "logit_bias", "min_p", "min_tokens", "presence_penalty",
        "prompt_logprobs", "repetition_detection", "repetition_penalty", "skip_special_tokens",
        "spaces_between_special_tokens", "stop_token_ids", "thinking_token_budget", "top_k",
    }
)  # fmt: skip
FORMER = RENAMED.keys() - _SAMPLING
"""Former names of options, of which a request says what they are called now."""
FORMER_SETTINGS = {*FORMER, *_MOVED}
"""Former names of options and settings, for which ``Settings`` say what they are called now."""
_OURS = (*RequestOptions.__annotations__, *FORMER)
WITHOUT_EFFECT = frozenset(
    {
        "api_key", "api_version", "audio_config", "class_name", "disabled_params", "download_dir", "evidence",
        "is_chat_model", "metadata", "modalities", "openai_organization", "organization",
        "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "reuse_client",
        "safety_identifier", "service_tier", "should_use_structured_outputs", "store", "stream",
        "stream_chunk_timeout", "stream_options", "stream_usage", "streaming", "strict",
        "tiktoken_model_name", "tokenizer", "trust_remote_code", "use_previous_response_id",
        "use_responses_api", "user", "verbose",
    }
)  # fmt: skip
"""Names without an effect: of another provider's accounts, caches and interfaces, and of what holds
anyway."""
_SUCCESSORS = {  # of OpenAI's and vLLM's former options, and of a variable that some give as one
    "functions": "tools",
    "function_call": "tool_choice",
    "enable_thinking": "chat_template_kwargs",
    **{f"guided_{kind}": "structured_outputs" for kind in ("choice", "grammar", "json", "regex")},
}
TAKEN = frozenset({*_OURS, *ALIASES, *_MEANT, *_NESTED, *_SAMPLING})
"""Names of all options of a call."""


def in_our_terms(options: Mapping[str, Any], aliases: Mapping[str, str] = ALIASES) -> dict[str, Any]:
    """Return options, each by the name that it has here; one that is given by that name wins. Of an HTTP
    client's timeouts (``httpx.Timeout``, or seconds to connect and to read), that of reading counts."""
    ours = {name: value for name, value in options.items() if name not in aliases}
    ours = {aliases[name]: options[name] for name in options if name in aliases} | ours
    if "timeout" in ours:
        given = ours["timeout"]
        pair = isinstance(given, tuple) and len(given) > 1
        ours["timeout"] = given[1] if pair else getattr(given, "read", given)
    return ours


def engine_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with vLLM's own arguments, which may stand among them, in ``engine_args``."""
    given = {name: value for name, value in settings.items() if value is not None}
    theirs = {name: given.pop(name) for name in ENGINE_ARGUMENTS if name in given}
    return given | {"engine_args": {**theirs, **given.get("engine_args", {})}} if theirs else given


def call_options(*given: Mapping[str, Any], also: Iterable[str] = ()) -> dict[str, Any]:
    """Return all options of one call, each by one name, of which the last ``given`` count most.

    None stands for not given. ``other`` has what only vLLM may know. also: names that the caller reads.
    Warns of a name without a meaning.
    """
    known = {*_OURS, *_MEANT, *also}
    options: dict[str, Any] = {}
    effort: dict[str, Any] = {}
    variables: dict[str, Any] = {}
    other: dict[str, Any] = {}
    unknown: list[str] = []
    for layer, nested in (found for one in given for found in _layers(one, False)):
        for name, value in in_our_terms(layer).items():
            if value is None or name in _NESTED or name in WITHOUT_EFFECT:
                continue
            if name == "chat_template_kwargs" and isinstance(value, Mapping):
                variables |= value
            elif name == "reasoning_effort":  # as vLLM's server tells templates of it
                effort = {name: value, "enable_thinking": value != "none"}
            elif name in known:
                options[name] = value
            elif name in _SAMPLING or nested:
                other[name] = value
            else:
                unknown.append(name)
    warn_about(unknown, known | TAKEN, stacklevel=6)
    return {"chat_template_kwargs": {**effort, **variables}, **options, "other": other}


def request_options(options: Mapping[str, Any]) -> RequestOptions:
    """Return what :func:`call_options` gave as a request takes it. Raises ConfigError for a wrong value."""
    asked: Any = {name: options[name] for name in _OURS if name in options}
    wanted, top = options.get("logprobs"), options.get("top_logprobs")  # some say whether, and how many
    asked["logprobs"] = top or (None if not wanted else int(wanted) if top is None else top)
    if "tool_choice" in options:
        asked["tool_choice"] = tool_choice(options["tool_choice"])
    asked |= _answer_format(options.get("response_format"), options.get("structured_outputs"))
    return asked


def tool_choice(choice: Any) -> str:
    """Return which tool may be called, as requests say it, of the forms that OpenAI, Anthropic, Bedrock and
    LangChain have for it."""
    match choice:
        case None | False | {"type": "auto"} | {"auto": _}:
            return AUTO
        case True | "any" | {"type": "any" | "required"} | {"any": _}:
            return REQUIRED
        case {"type": "none"}:
            return NONE
        case {"function": {"name": str(name)}} | {"type": "tool" | "function", "name": str(name)}:
            return name
        case {"tool": {"name": str(name)}}:
            return name
    return str(choice)


def warn_about(unknown: Iterable[str], known: Iterable[str], stacklevel: int) -> None:
    """Warn that names without a meaning here are ignored, and say what may have been meant."""
    for name in unknown:
        if name not in WITHOUT_EFFECT:
            meant = closest(_SUCCESSORS.get(name, name), {*known} - FORMER_SETTINGS)
            warnings.warn(f"ignored {name!r}{meant}", BlendragWarning, stacklevel)


def _layers(options: Mapping[str, Any], nested: bool) -> Iterator[tuple[Mapping[str, Any], bool]]:
    yield options, nested
    for name in _NESTED:
        if isinstance(inner := options.get(name), Mapping):
            yield from _layers(inner, True)


def _answer_format(response_format: Any, structured_outputs: Any) -> dict[str, Any]:
    """Return the schema asked for; or a grammar: of any JSON object, or the one that vLLM's field names."""
    match response_format, structured_outputs:
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}, None:
            return {"schema": schema}
        case {"type": "json_schema" | "json_object", "schema": dict(schema)}, None:  # of other servers
            return {"schema": schema}
        case {"type": "json_object"}, None:
            return {"grammar": Grammar("json_object", True)}
        case None | {"type": "text"}, None:
            return {}
        case None, {**named} if len(named) == 1:
            kind: Any
            ((kind, value),) = named.items()
            return {"grammar": Grammar(kind, value)}
        case None, _:
            raise ConfigError(f"structured_outputs {structured_outputs!r}: give one grammar by its kind")
    raise ConfigError(f"response_format {response_format!r}: give a json_schema, json_object or text")


def class_schema(schema: Any) -> Any:
    """Return the JSON schema of a pydantic class without what no grammar knows and the class sees to: its
    sets keep once what a list repeats (``uniqueItems``), it tells by itself which class of a union is meant
    (``oneOf``), and it checks ``multipleOf`` where its bounds name negative numbers, whose multiples grammars
    do not have."""
    if isinstance(schema, Mapping):
        one_of = "anyOf" if isinstance(schema.get("oneOf"), list) and "anyOf" not in schema else "oneOf"
        return {
            (one_of if name == "oneOf" else name): class_schema(one)
            for name, one in schema.items()
            if (name, one) != ("uniqueItems", True)
            and not (name == "multipleOf" and isinstance(one, int | float) and _below_zero(schema))
        }
    return [class_schema(one) for one in schema] if isinstance(schema, list) else schema


def _below_zero(schema: Mapping[str, Any]) -> bool:
    """Return whether the bounds of a schema's numbers say that they may be negative."""
    least = min(schema.get("minimum", 0), schema.get("exclusiveMinimum", 0))
    return least < 0 or min(schema.get("maximum", 1), schema.get("exclusiveMaximum", 1)) <= 0


def text_of_url(url: Any) -> str | None:
    """Return the text that a data URL holds, if it holds one."""
    head, _, data = url.partition(",") if isinstance(url, str) else ("", "", "")
    with contextlib.suppress(ValueError):
        if head.startswith("data:") and is_text(head[5:]):
            in_base64 = "base64" in head.lower().replace(" ", "").split(";")
            return (b64decode(data, validate=True) if in_base64 else unquote_to_bytes(data)).decode()
    return None


def is_text(kind: str) -> bool:
    """Return whether files of this MIME type are text."""
    return _TEXT.match(kind) is not None


_TEXT = re.compile(r"text/|[\w-]+/[\w.+-]*(?:javascript|json|jsonl|sql|toml|x-sh|xml|yaml)(?:;|$)")
