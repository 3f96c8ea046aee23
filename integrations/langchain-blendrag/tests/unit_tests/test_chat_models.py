"""``ChatBlend`` where no engine is needed."""

from __future__ import annotations

import asyncio
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import pytest
from langchain.agents import create_agent
from langchain_core.documents import Document
from langchain_core.exceptions import ContextOverflowError
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ValidationError

from blendrag.errors import (
    BlendragError,
    BlendragWarning,
    ConfigError,
    ModelNotFoundError,
    PromptTooLongError,
)
from blendrag.options import STEPS
from langchain_blendrag import ChatBlend
from langchain_rig import WAYS


def request(llm: ChatBlend, **kwargs: Any) -> Any:
    return llm._request([HumanMessage("Hi.")], None, kwargs)


@pytest.mark.parametrize("wrong", [{"recompute_ratio": 1.5}, {"temperature": -1}, {"max_tokens": 0}])
def test_wrong_value_is_found_when_the_object_is_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ChatBlend(**wrong)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("recompute_ration", "recompute_ratio"), ("modle", "model"), ("max_token", "max_tokens"),
        ("presence_penality", "presence_penalty"), ("defualt_headers", "default_headers"),
        ("kv_cache_gb", "kv_cache_gib"), ("functions", "tools"), ("function_call", "tool_choice"),
        ("guided_json", "structured_outputs"), ("enable_thinking", "chat_template_kwargs"),
    ],
)  # fmt: skip
def test_name_without_a_meaning_is_told_what_may_be_meant(written: str, meant: str) -> None:
    with pytest.warns(BlendragWarning, match=rf"ignored '{written}'; did you mean {meant}\?"):
        ChatBlend(**{written: 1})
    with pytest.warns(BlendragWarning, match=f"ignored '{written}'"):
        request(ChatBlend(), **{written: 1})


def test_no_field_has_an_alias_by_which_alone_type_checkers_would_know_it() -> None:
    own = ChatBlend.model_fields.keys() - BaseChatModel.model_fields.keys()
    assert not any(ChatBlend.model_fields[name].alias for name in own)
    assert ChatBlend(model_name="some/model").model == ChatBlend(model="some/model").model == "some/model"


def test_folder_of_no_name_is_the_usual_one() -> None:
    assert ChatBlend(kv_dir="").kv_dir is None  # type: ignore[arg-type]


def test_model_may_be_a_path_object() -> None:
    assert ChatBlend(model=Path("models/mine")).model == "models/mine"  # type: ignore[arg-type]


def test_several_close_names_are_listed() -> None:
    with pytest.warns(BlendragWarning, match=r"did you mean logprobs\? or top_logprobs\?"):
        ChatBlend(logprob=True)


# Of ChatOpenAI's names, those that mean something here, with a value.
TAKEN: dict[str, Any] = {
    "cache": False, "callbacks": None, "custom_get_token_ids": None, "default_headers": None,
    "default_query": None, "disable_streaming": False, "extra_body": {"min_p": 0.1},
    "frequency_penalty": 0.5, "http_async_client": None, "http_client": None, "logit_bias": {5: 1.0},
    "logprobs": True, "max_retries": 2, "max_tokens": 5, "metadata": None, "model_kwargs": {"min_p": 0.2},
    "model_name": "some/model", "n": 2, "name": None, "openai_api_base": None, "openai_api_key": "k",
    "output_version": None, "presence_penalty": 0.5, "profile": None, "rate_limiter": None,
    "reasoning_effort": "low", "request_timeout": 3.0, "seed": 1, "stop": ["a"], "streaming": False,
    "tags": None, "temperature": 0.5, "top_logprobs": 2, "top_p": 0.5, "verbose": False,
}  # fmt: skip
# Those that could change an answer elsewhere, and cannot here.
WARNED = {
    "context_management", "http_socket_options", "include", "include_response_headers", "openai_proxy",
    "reasoning", "truncation", "verbosity",
}  # fmt: skip
MADE_BY_ITSELF = {"client", "async_client", "root_client", "root_async_client"}


@pytest.mark.parametrize("name", sorted({*ChatOpenAI.model_fields} - MADE_BY_ITSELF))
def test_every_name_of_chat_openais_is_taken_harmless_or_warned_about(name: str) -> None:
    alias = ChatOpenAI.model_fields[name].alias
    for written in filter(None, (name, alias)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.simplefilter("ignore", ResourceWarning)  # of what another test has left to the collector
            ChatBlend(**{written: TAKEN.get(name)})
        assert bool(caught) == (name in WARNED), [str(one.message) for one in caught]


def test_sampling_of_the_object_reaches_the_request_and_that_of_the_call_wins() -> None:
    sampling: Any = {
        "top_k": 40, "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": 0.2,
        "repetition_penalty": 1.1, "logit_bias": {5: 1.0},
    }  # fmt: skip
    llm = ChatBlend(**sampling, stop_sequences=["a"], request_timeout=3, reasoning_effort="low")
    made = request(llm)
    assert made.sampling.other == sampling
    assert (made.sampling.stop, made.sampling.timeout_s) == (("a",), 3.0)
    assert made.chat_template_kwargs == {"reasoning_effort": "low", "enable_thinking": True}
    called = request(llm, top_k=2, stop_sequences=["b"], reasoning_effort="high")
    assert called.sampling.other == {**sampling, "top_k": 2} and called.sampling.stop == ("b",)
    assert called.chat_template_kwargs == {"reasoning_effort": "high", "enable_thinking": True}


@pytest.mark.parametrize("timeout", [7, (1, 7), httpx2.Timeout(7, connect=1)])
def test_timeout_is_taken_in_every_form_of_chat_openais(timeout: Any) -> None:
    assert request(ChatBlend(timeout=timeout)).sampling.timeout_s == 7
    assert request(ChatBlend(), request_timeout=timeout).sampling.timeout_s == 7
    with pytest.raises((ConfigError, ValueError)):
        ChatBlend(timeout="soon")


def test_extra_body_and_model_kwargs_hold_options_of_any_kind() -> None:
    body = {
        "top_k": 3, "max_completion_tokens": 9, "stop_token_ids": [2], "temperature": 0.25,
        "chat_template_kwargs": {"enable_thinking": False}, "blendrag": {"blend": False, "evidence": True},
        "structured_outputs": {"regex": "a+"},
    }  # fmt: skip
    llm = ChatBlend(temperature=0.75, model_kwargs={"top_k": 1, "top_p": 0.5}, extra_body=body)
    made = request(llm, chat_template_kwargs={"other": 1})
    assert made.sampling.other == {"top_k": 3, "stop_token_ids": [2]}
    assert (made.sampling.max_tokens, made.sampling.temperature, made.sampling.top_p) == (9, 0.25, 0.5)
    assert made.chat_template_kwargs == {"enable_thinking": False, "other": 1}
    assert not made.options.blend and (made.grammar.kind, made.grammar.value) == ("regex", "a+")
    called = request(llm, extra_body={"top_k": 5}, temperature=0.0)
    assert (called.sampling.other["top_k"], called.sampling.temperature) == (5, 0.0)
    with pytest.raises(ConfigError, match="one grammar by its kind"):
        request(ChatBlend(extra_body={"structured_outputs": "a+"}))


def test_document_alone_is_one_and_what_is_none_is_named() -> None:
    for given in ("The sea is salt.", Document("The sea is salt."), [Document("The sea is salt.")]):
        assert request(ChatBlend(), documents=given).documents == ("The sea is salt.",)
    for wrong in (3, [None], [["sea"]], [3]):
        with pytest.raises(ConfigError, match="documents has to be texts or documents"):
            request(ChatBlend(), documents=wrong)


def test_tools_may_be_bound_by_hand() -> None:
    def add(a: int) -> int:
        """Add."""
        return a

    made = request(ChatBlend(), tools=[add], tool_choice="any", parallel_tool_calls=False)
    assert made.tools[0]["function"]["name"] == "add" and made.tool_choice == "required"
    assert not made.parallel_tool_calls


def test_way_to_a_server_is_warned_about_without_one() -> None:
    with pytest.warns(BlendragWarning, match="ignored default_headers, http_client: without a base_url"):
        ChatBlend(default_headers={"a": "b"}, http_client=httpx2.Client())


# -- several answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"n": 3}, {"model_kwargs": {"n": 3}}])
def test_prompt_has_as_many_answers_as_are_asked_for(
    make: Callable[..., ChatBlend], speaker: Any, options: dict[str, Any]
) -> None:
    asked = [[HumanMessage("Hi.")]]
    one = make().generate(asked).generations[0][0].message.usage_metadata
    for temperature, requests in ((0.0, 1), (0.7, 3)):
        llm = make(temperature=temperature, seed=5, **options)
        for result in (llm.generate(asked), asyncio.run(llm.agenerate(asked))):
            (generations,) = result.generations
            assert [each.text for each in generations] == ["Good day."] * 3
            for each in generations:
                usage = each.message.usage_metadata
                assert usage["input_tokens"] == one["input_tokens"]
                assert usage["output_tokens"] == 3 * one["output_tokens"]
                assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
            seeds = sorted(asked.sampling.seed for asked in speaker.asked[-requests:])
            assert seeds == [5, 6, 7][:requests]
    assert len(speaker.asked) == 1 + 2 * 1 + 2 * 3
    assert make(n=3).invoke("Hi.").text == "Good day."


def test_stream_is_one_answer(make: Callable[..., ChatBlend]) -> None:
    with pytest.raises(ConfigError, match="a stream is one answer"):
        list(make(n=2).stream("Hi."))
    for wrong in (0, "2"):
        with pytest.raises(ConfigError, match="number of answers"):
            make().invoke("Hi.", n=wrong)


# -- errors that LangChain has names for ------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_prompt_that_is_too_long_is_langchains_error_and_ours(
    make: Callable[..., ChatBlend], speaker: Any, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    def too_long(*_: Any) -> Any:
        raise PromptTooLongError("the prompt has 9000 tokens")
        yield

    async def atoo_long(*_: Any) -> Any:
        raise PromptTooLongError("the prompt has 9000 tokens")
        yield

    monkeypatch.setattr(speaker, "stream", too_long, raising=False)
    monkeypatch.setattr(speaker, "astream", atoo_long, raising=False)
    with pytest.raises(ContextOverflowError, match="9000 tokens") as raised:
        WAYS[way](make(), "Hi.")
    assert isinstance(raised.value, PromptTooLongError) and isinstance(raised.value, BlendragError)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_cannot_be_answered_and_has_no_tokens(make: Callable[..., ChatBlend], way: str) -> None:
    with pytest.raises(ConfigError, match="no message to answer"):
        WAYS[way](make(), [])
    assert make().get_num_tokens_from_messages([]) == 0


def test_answer_may_have_the_rest_of_the_window(make: Callable[..., ChatBlend], speaker: Any) -> None:
    llm = make()
    llm.invoke("Hi.")
    room = speaker.max_model_len - llm.get_num_tokens_from_messages([HumanMessage("Hi.")])
    assert speaker.asked[0].sampling.max_tokens == room and llm.max_tokens is None
    assert llm.profile and llm.profile["max_output_tokens"] == llm.profile["max_input_tokens"]
    assert make(max_tokens=7).profile["max_output_tokens"] == 7


def test_setting_that_is_no_field_is_kept() -> None:
    for llm in (ChatBlend(kv_cache_gib=3), ChatBlend(settings={"kv_cache_gib": 3})):
        assert llm.settings.kv_cache_gib == 3


def test_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLENDRAG_RECOMPUTE_RATIO", "0.4")
    monkeypatch.setenv("BLENDRAG_BLEND", "false")
    llm = ChatBlend()
    assert llm.chat.settings.recompute_ratio == 0.4 and not llm.chat.settings.blend


def test_model_that_is_not_there_is_a_clear_error() -> None:
    with pytest.raises(ModelNotFoundError, match=r"no model folder \./modle"):
        ChatBlend(model="./modle").get_num_tokens("Hi.")


def test_option_of_a_call_wins_over_the_field() -> None:
    llm = ChatBlend(temperature=0.5, stop=["a"], blend=False, recompute_ratio=0.3)
    made = request(llm, temperature=0.0, stop=["b"], blend=True, recompute_ratio=0.1, top_k=5)
    assert (made.sampling.temperature, made.sampling.stop, made.sampling.other) == (0.0, ("b",), {"top_k": 5})
    assert made.options.blend and made.options.recompute_ratio == 0.1
    assert not request(llm).options.blend


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"mode": "off"}, "mode is called blend now: blend=False"),
        ({"recompute_ratio": 1.5}, "recompute_ratio"),
        ({"blend": "of"}, "blend"),
        ({"quality": "fats"}, "quality must be fast, balanced|'fast', 'balanced' or"),
    ],
)
def test_wrong_option_is_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        request(ChatBlend(), **wrong)
    with pytest.raises((ConfigError, ValidationError), match=said):
        ChatBlend(**wrong)


def test_option_of_a_call_is_taken_whatever_the_tiers() -> None:
    llm = ChatBlend(tiers=[{"kind": "ram"}, {"kind": "disk"}])
    options = request(llm, recompute_ratio=0.3, selector="hkvd").options
    assert (options.recompute_ratio, options.selector, options.blend) == (0.3, "hkvd", True)
    assert not request(llm, blend=False).options.blend and len(llm.settings.tiers) == 2


def test_quality_of_a_call_wins_over_the_ratio_of_the_model() -> None:
    options = request(ChatBlend(recompute_ratio=0.4, quality="close"), quality="fast").options
    assert (options.selector, options.recompute_ratio) == STEPS["fast"]
    assert request(ChatBlend(recompute_ratio=0.4, quality="close")).options.recompute_ratio == 0.4


def test_tools_and_choices_are_taken_as_other_providers_write_them() -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [
        {"type": "function", "name": "weather", "description": "", "parameters": parameters},
        {"name": "weather", "description": "", "input_schema": parameters},
        {"name": "weather", "title": "Weather", "inputSchema": parameters},
        {"name": "weather", **parameters},
    ]
    choices = {
        "weather": (
            {"type": "tool", "name": "weather"},
            {"type": "function", "name": "weather"},
            {"tool": {"name": "weather"}},
        ),
        "required": ({"type": "any"}, {"any": {}}, "any", True),
        "auto": ({"type": "auto"}, {"auto": {}}, None),
        "none": ({"type": "none"}, "none"),
    }
    for offered in tools:
        for meant, written in choices.items():
            for choice in written:
                made = request(ChatBlend(), tools=[offered], tool_choice=choice)
                assert made.tools[0]["function"]["parameters"] == parameters and made.tool_choice == meant
    for kind, more in (("web_search", {}), ("web_search_20250305", {"name": "web_search"})):
        with pytest.raises(ConfigError, match=f"{kind!r} is another provider's own"):
            ChatBlend().bind_tools([{"type": kind, **more}])


class Part(BaseModel):
    """A part of a crane."""

    name: str
    parts: list[Part] = []


@tool
def order(part: Part) -> str:
    """Orders a part."""
    return part.name


@dataclass
class Assembly:
    """Parts of a crane."""

    name: str
    parts: list[Assembly]


def test_schema_that_refers_to_itself_stays_whole() -> None:
    """LangChain's own conversion allows anything where it does."""
    wrong = {"name": "rope", "parts": [{"name": "hook", "parts": [{"nome": "eye"}]}]}
    for offered in (Part, Assembly, order, order.func):
        parameters = request(ChatBlend(), tools=[offered]).tools[0]["function"]["parameters"]
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong if isinstance(offered, type) else {"part": wrong}, parameters)
    for schema in (Part, Assembly, Part.model_json_schema()):
        for method in ("json_schema", "json_mode"):
            held: Any = ChatBlend().with_structured_output(schema, method=method)
            made = request(ChatBlend(), **held.first.kwargs)
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(wrong, made.schema)


GOOD, CUT = '{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "arguments": {"a": '
WRONG, UNKNOWN = '{"name": "f", "arguments": [1]}', '{"name": "g", "arguments": {}}'


@pytest.mark.parametrize("way", [*WAYS, "stream_events"])
@pytest.mark.parametrize(
    ("calls", "wanted", "reason"),
    [
        ([CUT], 0, "cut off"),
        ([WRONG], 0, "not an object"),
        ([GOOD, CUT], 1, "cut off"),
        ([WRONG, GOOD], 1, "not an object"),
    ],
)
def test_invalid_call_is_given_with_its_reason_on_every_way(
    make: Callable[..., ChatBlend], speaker: Any, way: str, calls: list[str], wanted: int, reason: str
) -> None:
    written = [f"<tool_call>\n{one}" + ("\n</tool_call>" if one != CUT else "") for one in calls]
    speaker.answers = ["I look. " + "".join(written)]
    llm = make().bind_tools([{"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}])
    if way == "stream_events":
        events: Any = llm.stream_events("Hi.", version="v3")
        message = [*events] and events.output
    else:
        message = reduce(add, WAYS[way](llm, "Hi."))
    assert [call["args"] for call in message.tool_calls] == [{"a": 1}] * wanted
    (invalid,) = message.invalid_tool_calls
    assert reason in f"{invalid['error']} {invalid['args']}"
    assert invalid["args"].endswith(next(one for one in calls if one != GOOD).strip())
    assert message.text == "I look. "


@pytest.mark.parametrize("way", WAYS)
def test_agent_tells_the_model_of_a_tool_that_there_is_not(
    make: Callable[..., ChatBlend], speaker: Any, way: str
) -> None:
    speaker.answers = [f"<tool_call>\n{UNKNOWN}\n</tool_call>", "Then I say it."]
    asked = {"messages": "Hi."}
    last = WAYS[way](create_agent(make(), [order]), asked)[-1]
    (answer,) = last.get("model", last)["messages"][-1:]
    assert answer.text == "Then I say it."
    assert "g is not a valid tool" in speaker.prompts()[-1]


def test_choice_of_no_tool_is_found_out_when_tools_are_bound() -> None:
    with pytest.raises(ConfigError, match="wether"):
        ChatBlend().bind_tools(
            [{"name": "weather", "description": "", "parameters": {}}], tool_choice="wether"
        )


def test_object_can_be_sent_to_another_process() -> None:
    llm = ChatBlend(temperature=0.3, kv_dir="kv")
    assert llm.chat is llm.chat
    again = pickle.loads(pickle.dumps(llm))
    assert again.model_dump() == llm.model_dump() and again.chat.settings == llm.chat.settings


def test_profile_has_the_window_of_the_model_at_hand(model_dir: Any) -> None:
    profile = ChatBlend(model=str(model_dir)).profile
    assert profile is not None and profile["max_input_tokens"] == 8192
    assert profile["tool_calling"] and not profile["image_inputs"]
