"""Tools and schemas, from LangChain's many forms to what requests carry."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from blendrag.errors import ConfigError


def bound_tools(tools: Sequence[Any], tool_choice: str | bool | dict[str, Any] | None) -> dict[str, Any]:
    """Keyword arguments of a request that offers tools. Raises ConfigError for a choice that names none."""
    offered = [convert_to_openai_tool(tool) for tool in tools]
    names = [tool["function"]["name"] for tool in offered]
    match tool_choice:
        case None | False:
            choice = "auto"
        case True | "any":
            choice = "required"
        case {"function": {"name": str(name)}}:
            choice = name
        case _:
            choice = str(tool_choice)
    if choice not in ("auto", "none", "required", *names):
        raise ConfigError(f"tool_choice {choice!r} names none of the tools {names}")
    return {"tools": offered, "tool_choice": choice}


def structured(
    llm: BaseChatModel, schema: Any, method: str, include_raw: bool, kwargs: dict[str, Any]
) -> Runnable[LanguageModelInput, Any]:
    """The model, held to a schema, and a parser behind it."""
    is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
    parser: BaseOutputParser[Any]
    if schema is None and method != "json_mode":
        raise ConfigError(f"method {method!r} needs a schema")
    if method == "function_calling":
        bound = bound_tools([schema], True)
        name = bound["tools"][0]["function"]["name"]
        parser = (
            PydanticToolsParser(tools=[schema], first_tool_only=True)
            if is_class
            else JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
        )
    elif method in ("json_schema", "json_mode"):
        response_format: dict[str, Any] = {"type": "json_object"}
        if schema is not None:
            converted = convert_to_json_schema(schema)
            response_format = {
                "type": "json_schema",
                "json_schema": {"name": converted.get("title", "answer"), "schema": converted},
            }
        bound = {"response_format": response_format}
        parser = PydanticOutputParser(pydantic_object=schema) if is_class else JsonOutputParser()
    else:
        raise ConfigError(f"method {method!r}: there are json_schema, function_calling and json_mode")
    described = convert_to_openai_tool(schema) if schema is not None else None
    kept = {name: value for name, value in kwargs.items() if name != "tools"}
    held = llm.bind(
        **bound, **kept, ls_structured_output_format={"kwargs": {"method": method}, "schema": described}
    )
    if not include_raw:
        return held | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=held) | parsed.with_fallbacks([failed], exception_key="parsing_error")
