"""A reader that tells a model's tool calls from its text, by vLLM's tool parsers."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blendrag.engine.client.reasoning import HARMONY, Reasoning
from blendrag.errors import ConfigError
from blendrag.models import load_tokenizer
from blendrag.names import closest
from blendrag.settings import AUTO_PARSER, NO_PARSER

_log = logging.getLogger(__name__)

_OWN = "hermes"  # vLLM's name of its parser of JSON between <tool_call> tags
_HARMONY = "openai"  # vLLM's name of its parser of gpt-oss, which reads tokens
_ESCAPING = "functiongemma"  # that of one whose calls are in braces, their texts between escapes
_ESCAPED = re.compile(r"<start_function_call>call:([^\s{]+)({.*?})(?:<end_function_call>|\s*\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Notation:
    """A family of models' way to write tool calls.

    parser: vLLM's name of the parser that reads it. marks: texts that begin calls, and nothing else. signs:
    texts that are all in the chat templates of such models; none: the marks are. each: a text that stands in
    every call once; "": the marks do. perhaps: texts that may begin a call. end: the text that ends a call,
    of notations that show nowhere else whether a call is whole, as JSON does.
    """

    parser: str
    marks: tuple[str, ...]
    signs: tuple[str, ...] = ()
    each: str = ""
    perhaps: tuple[str, ...] = ()
    end: str = ""


# A template's notation is the first one whose signs are all in it.
NOTATIONS = (
    Notation(_HARMONY, (), signs=HARMONY),
    Notation(
        "deepseek_v32",
        ("<｜DSML｜function_calls>",),
        signs=("<｜DSML｜",),
        each="<｜DSML｜invoke",
        end="</｜DSML｜invoke>",
    ),
    Notation(
        "deepseek_v3",
        ("<｜tool▁calls▁begin｜>",),
        signs=("<｜tool▁calls▁begin｜>", "```json"),
        each="<｜tool▁call▁begin｜>",
        end="<｜tool▁call▁end｜>",
    ),
    Notation(
        "deepseek_v31", ("<｜tool▁calls▁begin｜>",), each="<｜tool▁call▁begin｜>", end="<｜tool▁call▁end｜>"
    ),
    Notation(
        "kimi_k2", ("<|tool_calls_section_begin|>",), each="<|tool_call_begin|>", end="<|tool_call_end|>"
    ),
    Notation("minimax_m2", ("<minimax:tool_call>",), each="<invoke name=", end="</invoke>"),
    Notation("seed_oss", ("<seed:tool_call>",), each="<function=", end="</function>"),
    Notation("longcat", ("<longcat_tool_call>",)),
    Notation("gemma4", ("<|tool_call>",), end="<tool_call|>"),
    Notation(_ESCAPING, ("<start_function_call>",), end="<end_function_call>"),
    Notation("lfm2", ("<|tool_call_start|>",), signs=("<|tool_list_start|>",), end="<|tool_call_end|>"),
    Notation("mistral", ("[TOOL_CALLS]",), end="}"),
    Notation("internlm", ("<|action_start|>",), end="<|action_end|>"),
    Notation("phi4_mini_json", ("functools[",), signs=("<|tool|>", "<|/tool|>")),
    Notation("granite", ("<|tool_call|>", "<tool_call>"), signs=("<|tool_call|>",)),
    Notation("granite4", ("<tool_call>",), signs=("<|start_of_role|>", "<tool_call>")),
    Notation("jamba", ("<tool_calls>",), signs=("<|bom|>", "<tool_calls>")),
    Notation("hunyuan_a13b", ("<tool_calls>",)),
    Notation("olmo3", ("<function_calls>",)),
    Notation("glm45", ("<tool_call>",), signs=("<tool_call>", "<arg_key>"), end="</tool_call>"),
    Notation(
        "qwen3_coder",
        ("<tool_call>", "<function="),
        signs=("<function=", "<parameter="),
        each="<function=",
        end="</function>",
    ),
    Notation(_OWN, ("<tool_call>",)),
    Notation("pythonic", (), signs=("[func_name1(",)),
    Notation("llama3_json", ("<|python_tag|>",), signs=("dictionary of argument name",), perhaps=("{",)),
)

# Names of vLLM's parsers that read what another one reads.
_SAME = {
    "glm47": "glm45",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "qwen3_json": "hermes",
    "qwen3_xml": "qwen3_coder",
}


def tool_parser_name(wanted: str, tokenizer: Any) -> str:
    """Return vLLM's name of the parser that reads this model's calls, or "" for blendrag's own reading.

    Raises ConfigError for a name that vLLM does not know, and for a parser that needs tokens, or a fast
    tokenizer, which the model lacks.
    """
    from blendrag.engine.compat.requests import tool_parser, tool_parsers

    if wanted == NO_PARSER:
        return ""
    known = tool_parsers()
    if wanted not in (AUTO_PARSER, *known):
        choice = [AUTO_PARSER, NO_PARSER, *known]
        raise ConfigError(
            f"no tool_parser {wanted!r}; there are {', '.join(choice)}{closest(wanted, choice)}"
        )
    name = wanted
    if wanted == AUTO_PARSER:
        template = str(getattr(tokenizer, "chat_template", None) or "")
        found = (one.parser for one in NOTATIONS if all(sign in template for sign in one.signs or one.marks))
        name = next(found, "")
        if name not in known:
            return ""
    try:
        tool_parser(name, tokenizer, (), {})
    except Exception as error:  # each parser has its own ways to refuse a model
        if wanted == AUTO_PARSER:
            return ""
        raise ConfigError(f"tool_parser {name!r} cannot read this model: {error}") from error
    return name


def server_tool_parser(wanted: str, model: Path) -> str:
    """Return the parser that a server of the model in this folder reads calls with; "" for none. It is that
    of :func:`tool_parser_name`; for models whose templates know no tools, that of what blendrag's own clients
    make them write."""
    if wanted == NO_PARSER:
        return ""
    return tool_parser_name(wanted, load_tokenizer(model)) or _OWN


class ToolParser:
    """A reader of one answer's calls, once the answer is whole: the parsers' own streams show text that may
    yet be a call, or lose text that is none. Until then, only what stands before the first mark of a call is
    text."""

    def __init__(
        self, name: str, tokenizer: Any, tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> None:
        """Make vLLM's parser of this name for these tools. variables: the chat template's."""
        from blendrag.engine.compat.requests import tool_parser

        try:
            self._parser, self._request = tool_parser(name, tokenizer, tools, variables)
        except Exception as error:
            raise ConfigError(f"tool_parser {name!r} cannot read these tools: {error}") from error
        known = next((one for one in NOTATIONS if one.parser == _SAME.get(name, name)), Notation("", ()))
        self._by_tokens, self._escapes = name == _HARMONY, name == _ESCAPING
        self._tools = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        self.apart = False
        """True if calls are told from tokens, and are no part of the text."""
        self.skip_special_tokens: bool = bool(self._request.skip_special_tokens)
        """True if the engine leaves special tokens out of the text. Many parsers need them."""
        self.marks: tuple[str, ...] | None = known.marks if known.parser and not self._by_tokens else None
        """The texts that begin calls and nothing else; None if they are not known."""
        self.perhaps, self.end = known.perhaps, known.end  # as in Notation
        self.each: tuple[str, ...] = (known.each,) if known.each else known.marks
        """The texts one of which stands in every call once."""

    def read_behind(self, reader: Reasoning | None) -> None:
        """Read text that comes through ``reader``, which leaves out what its parser takes for no text."""
        self.apart = self._by_tokens and reader is not None

    def read(self, text: str, token_ids: Sequence[int]) -> tuple[str, list[tuple[str, str]]]:
        """Return the text of an answer, and the names and arguments of its calls: arguments as the model
        wrote them, or as JSON. If there are no calls, the text is unchanged."""
        if self._escapes and (found := [*_ESCAPED.finditer(text)]):  # vLLM's reads texts only
            return _ESCAPED.sub("", text), [call for one in found for call in self._escaped(one)]
        return self._parsed(text, token_ids)

    def _escaped(self, call: re.Match[str]) -> list[tuple[str, str]]:
        """Return a call between escapes. Values that are no texts by its schema are the JSON in them."""
        try:
            arguments = json.loads(_unescaped(call[2]))
        except (ValueError, RecursionError):
            return self._parsed(call[0], ())[1]
        schemas = (self._tools.get(call[1]) or {}).get("properties") or {}
        for name, value in arguments.items():
            if isinstance(value, str) and not _is_text(schemas.get(name)):
                with contextlib.suppress(ValueError, RecursionError):
                    arguments[name] = json.loads(value)
        return [(call[1], json.dumps(arguments))]

    def _parsed(self, text: str, token_ids: Sequence[int]) -> tuple[str, list[tuple[str, str]]]:
        try:
            _, content, calls = self._parser.parse(
                text, self._request, enable_auto_tools=True, model_output_token_ids=list(token_ids)
            )
        except Exception:  # a model may say anything
            _log.debug("vLLM's parser failed at an answer", exc_info=True)
            calls = None
        if not calls:
            return text, []
        return content or "", [(call.name, call.arguments) for call in calls]

    def calls_in(self, text: str) -> int:
        """Return how many calls seem to be in a text, at least."""
        return sum(map(text.count, self.each))


def _is_text(schema: Any) -> bool:
    """Return whether a schema says of a value that it may be a text."""
    if not isinstance(schema, Mapping):
        return False
    return "string" in (schema.get("type") or ()) or any(map(_is_text, schema.get("anyOf") or ()))


def _unescaped(arguments: str) -> str:
    """Return arguments as JSON: their texts quoted, and the names of all."""
    return "".join(
        json.dumps(piece) if at % 2 else re.sub(r"([{,]\s*)([^\s{}\[\],:]+)\s*:", r'\1"\2":', piece)
        for at, piece in enumerate(arguments.split("<escape>"))
    )
