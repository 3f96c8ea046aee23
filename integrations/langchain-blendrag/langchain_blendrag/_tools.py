"""Tools and schemas, in LangChain's many forms and in what requests carry."""

from __future__ import annotations

import json
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from enum import Enum
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    NotRequired,
    Required,
    TypedDict,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableConfig, RunnableGenerator, RunnableLambda, RunnableMap
from langchain_core.tools import BaseTool, create_schema_from_function
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import TypeAdapter, ValidationError

from blendrag import foreign
from blendrag.errors import BlendragWarning, ConfigError

# Keys of functions as OpenAI, Anthropic, MCP and Bedrock write them: what has none of them is a JSON schema.
_OF_FUNCTIONS = {"function", "inputSchema", "input_schema", "name", "parameters", "toolSpec"}


def bound_tools(tools: Sequence[Any], tool_choice: str | bool | dict[str, Any] | None) -> dict[str, Any]:
    """Return keyword arguments of a request that offers tools. Raises ConfigError for a choice that names
    none."""
    offered = [_function(tool) for tool in tools]
    names = [tool["function"]["name"] for tool in offered]
    choice = foreign.tool_choice(tool_choice)
    if choice not in ("auto", "none", "required", *names):
        raise ConfigError(f"tool_choice {choice!r} names none of the tools {names}")
    return {"tools": offered, "tool_choice": choice}


def _function(tool: Any) -> dict[str, Any]:
    """Return a tool that is a function, which some providers write without the name ``function``."""
    if isinstance(tool, Mapping) and "inputSchema" in tool:  # as MCP servers list them
        tool = {**tool, "input_schema": tool["inputSchema"]}
    if isinstance(tool, dict) and {"name", "properties"} <= tool.keys():
        tool = _json_schema(tool)
    kind = _class_of(tool)
    made = convert_to_openai_tool(
        tool
        if isinstance(tool, BaseTool)
        else _with_optional_fields(kind, {})  # it may have a name of its own
    )
    given = tool if isinstance(tool, Mapping) else made
    if given.get("type", "function") not in ("function", "object") and "input_schema" not in given:
        raise ConfigError(f"tool {given['type']!r} is another provider's own: give a function")
    if "function" not in made:
        made = {"type": "function", "function": {name: made[name] for name in made if name != "type"}}
    if (whole := _lost_in_part(kind)) is not None:
        made["function"]["parameters"] = whole
    return made if isinstance(kind, Mapping) else foreign.class_schema(made)


def _unwrapped(schema: Any) -> Any:
    """Return the schema that a ``response_format`` of OpenAI's, or a function, has inside; any other as it
    is."""
    if isinstance(schema, dict) and schema.get("type") == "json_schema":
        schema = schema.get("json_schema", schema)
    if isinstance(schema, dict) and isinstance(schema.get("schema"), dict):
        return {"title": schema.get("name", "answer"), **schema["schema"]}
    if isinstance(schema, dict) and (keys := schema.keys() & _OF_FUNCTIONS):
        return _json_schema(schema if keys == {"name"} else _function(schema))
    return schema


_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")  # of JSON schemas
_OF_SCHEMAS = {"$defs", "$ref", "allOf", "anyOf", "enum", "oneOf", "properties"}


def answer_format(wanted: Any) -> Any:
    """Return the ``response_format`` that a class or a JSON schema stands for; any other as it is."""
    if isinstance(wanted, dict) and wanted.get("type") not in _TYPES and _OF_SCHEMAS.isdisjoint(wanted):
        return wanted
    schema = _json_schema(wanted)
    return {"type": "json_schema", "json_schema": {"name": schema.get("title", "answer"), "schema": schema}}


def _json_schema(schema: Any) -> dict[str, Any]:
    """Return a schema in any of LangChain's forms as JSON schema."""
    if isinstance(schema, dict) and schema.keys() & _OF_FUNCTIONS == {"name"}:  # to LangChain, a function
        schema = {**schema, "title": schema["name"]}
        del schema["name"]
    kind = _class_of(schema)
    whole = _lost_in_part(kind)
    if whole is None:
        whole = convert_to_json_schema(_with_optional_fields(kind, {}))
    made = {"title": getattr(schema, "__name__", "answer"), **whole}
    return made if isinstance(schema, Mapping) else foreign.class_schema(made)


class _Null:
    """None, as a class of pydantic's first version, by which LangChain converts TypedDicts."""

    @classmethod
    def __get_validators__(cls) -> Iterator[Callable[..., Any]]:
        return iter(())

    @classmethod
    def __modify_schema__(cls, schema: dict[str, Any]) -> None:
        schema["type"] = "null"


def _with_optional_fields(kind: Any, made: dict[Any, Any]) -> Any:
    """Return a type whose TypedDicts say by a default which fields may be left out, and which may be null, as
    LangChain's conversion reads it: that takes fields of ``total=False`` for required, fails at
    ``NotRequired``, and passes over None. made: those that were looked at already."""
    if kind is NoneType:
        return _Null
    if not hasattr(kind, "__optional_keys__"):
        inner = get_args(kind)
        changed = tuple(_with_optional_fields(one, made) for one in inner)
        if changed == inner:
            return kind
        again: Any = Union if isinstance(kind, UnionType) else get_origin(kind)
        return kind.copy_with(changed) if hasattr(kind, "copy_with") else again[changed]
    if kind not in made:
        made[kind] = kind  # it may hold itself
        fields: dict[str, Any] = {}
        for name, hint in get_type_hints(kind, include_extras=True).items():
            wrapper, about = get_origin(hint), list[Any]()
            if wrapper in (Required, NotRequired):
                (hint,) = get_args(hint)
            if get_origin(hint) is Annotated:
                hint, *about = get_args(hint)
            if wrapper is NotRequired or (name in kind.__optional_keys__ and wrapper is not Required):
                about[:1] = [None]
            hint = _with_optional_fields(hint, made)
            fields[name] = Annotated[hint, *about] if about else hint
        typed: Any = TypedDict
        made[kind] = typed(kind.__name__, fields)
        made[kind].__doc__ = kind.__doc__ or ""  # else the model is told what a dict is
    return made[kind]


def _is_model(schema: Any) -> bool:
    return isinstance(schema, type) and is_basemodel_subclass(schema)


def _is_value(schema: Any) -> bool:
    """Return whether a schema is a type of no fields of its own: an Enum, a list, a union, a number."""
    plain = isinstance(schema, type) and (issubclass(schema, Enum) or schema.__module__ == "builtins")
    return plain or get_origin(schema) is not None


def _class_of(schema: Any) -> Any:
    """Return the class of the arguments of a tool, a function or a constructor; any other schema as it is."""
    if isinstance(schema, BaseTool):
        return schema.tool_call_schema
    is_typed_dict = hasattr(schema, "__optional_keys__")
    if not callable(schema) or _is_model(schema) or _is_value(schema) or is_typed_dict:
        return schema
    return create_schema_from_function(
        schema.__name__,
        schema,
        filter_args=(),
        parse_docstring=True,
        error_on_invalid_docstring=False,
        include_injected=False,
    )


def _lost_in_part(schema: Any) -> dict[str, Any] | None:
    """Return the JSON schema of a class, or a dictionary, for parts of which LangChain's conversion allows
    anything: those that refer to one around them, and a whole that is no object with properties. None for
    all others."""
    if _is_model(schema) and hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if _is_value(schema):  # LangChain's asks for the arguments of its constructor, or fails
        return TypeAdapter(schema).json_schema()
    if not isinstance(schema, dict):
        return None
    if not schema.keys() & _OF_FUNCTIONS and not {"title", "properties"} <= schema.keys():
        return schema

    def returns(part: Any, around: tuple[str, ...]) -> bool:
        if isinstance(part, list):
            return any(returns(one, around) for one in part)
        if not isinstance(part, dict):
            return False
        reference = part.get("$ref")
        if isinstance(reference, str) and reference.startswith(("#/$defs/", "#/definitions/")):
            kind, name = reference.split("/")[1:3]
            return name in around or returns(schema.get(kind, {}).get(name), (*around, name))
        return any(returns(one, around) for name, one in part.items() if name not in ("$defs", "definitions"))

    return schema if returns(schema, ()) else None


def structured(
    llm: BaseChatModel, schema: Any, method: str, include_raw: bool, kwargs: dict[str, Any]
) -> Runnable[LanguageModelInput, Any]:
    """Return the model, held to a schema, and a parser behind it. An answer that was cut off is an
    OutputParserException, at the end of a stream that may have given out beginnings of a dictionary."""
    schema = _unwrapped(schema)
    is_class = _is_model(schema)
    parser: BaseOutputParser[Any]
    if schema is None and method != "json_mode":
        raise ConfigError(f"method {method!r} needs a schema")
    if method == "function_calling":
        if _is_value(schema) or _json_schema(schema).get("type", "object") != "object":
            raise ConfigError("method 'function_calling' needs a schema of an object: a call's arguments")
        bound = bound_tools([_json_schema(schema) if isinstance(schema, dict) else schema], True)
        name = bound["tools"][0]["function"]["name"]
        parser = (
            PydanticToolsParser(tools=[schema], first_tool_only=True)
            if is_class
            else JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
        )
    elif method in ("json_schema", "json_mode"):
        bound = {"response_format": {"type": "json_object"} if schema is None else answer_format(schema)}
        parser = PydanticOutputParser(pydantic_object=schema) if is_class else JsonOutputParser()
    else:
        raise ConfigError(f"method {method!r}: there are json_schema, function_calling and json_mode")
    described = convert_to_openai_tool(_json_schema(schema)) if schema is not None else None
    if kwargs.get("tools"):
        said = "ignored 'tools': an answer of a schema calls none; bind_tools() takes a response_format"
        warnings.warn(said, BlendragWarning, stacklevel=3)
    kept = {name: value for name, value in kwargs.items() if name != "tools"}
    held = llm.bind(
        **bound, **kept, ls_structured_output_format={"kwargs": {"method": method}, "schema": described}
    )
    whole = _whole(_check_call if method == "function_calling" else _check_json)
    # A class says nothing of a field that has not come yet, if it has a default: its objects come whole.
    read = whole | (RunnableLambda(parser.invoke, parser.ainvoke) if is_class else parser)
    if _is_value(schema):
        read = whole | RunnableLambda(_reader(schema))
    return RunnableMap(raw=held) | RunnableLambda(_with_raw(read)) if include_raw else held | read


def _reader(kind: Any) -> Callable[[AIMessage], Any]:
    adapter = TypeAdapter(kind)

    def value_of(message: AIMessage) -> Any:
        try:
            return adapter.validate_json(message.text)
        except ValidationError as error:
            raise OutputParserException(str(error), llm_output=message.text) from error

    return value_of


def _with_raw(read: Runnable[Any, Any]) -> Callable[..., dict[str, Any]]:
    def parse(found: dict[str, Any], config: RunnableConfig) -> dict[str, Any]:
        try:
            return {**found, "parsed": read.invoke(found["raw"], config), "parsing_error": None}
        except Exception as error:  # whatever it is, it is the user's to look at
            return {**found, "parsed": None, "parsing_error": error}

    return parse


def _whole(check: Callable[[AIMessage], None]) -> Runnable[Any, Any]:
    """Hand on a message, or the chunks of one, and look at the whole behind the last."""

    def checked(chunks: Iterator[Any]) -> Iterator[Any]:
        whole: Any = None
        for chunk in chunks:
            whole = chunk if whole is None else whole + chunk
            yield chunk
        check(whole)

    async def achecked(chunks: AsyncIterator[Any]) -> AsyncIterator[Any]:
        whole: Any = None
        async for chunk in chunks:
            whole = chunk if whole is None else whole + chunk
            yield chunk
        check(whole)

    return RunnableGenerator(checked, achecked)


def _check_call(message: AIMessage) -> None:
    if not message.tool_calls:
        calls = message.invalid_tool_calls  # in a stream, the error is the first line
        came = (str(one["args"]).split("\n", 0 if one["error"] else 1)[-1] for one in calls)
        raise _not_whole(message, "call", "".join(came))


def _check_json(message: AIMessage) -> None:
    text = str(message.text)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise _not_whole(message, "JSON", text) from None
    if isinstance(value, int | float) and _is_cut(message):  # digits may be missing
        raise _not_whole(message, "JSON", text)


def _is_cut(message: AIMessage) -> bool:
    return message.response_metadata.get("finish_reason") == "length"


def _not_whole(message: AIMessage, wanted: str, text: str) -> OutputParserException:
    why = "max_tokens, or the model's window, cut it off" if _is_cut(message) else "it ended before"
    came = f"came: {text}" if text else "nothing of it came"
    return OutputParserException(f"the answer is no whole {wanted}: {why}; {came}", llm_output=text)
