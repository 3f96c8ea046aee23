"""Tool calls, with what a model would say scripted."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent, ToolCallResult
from llama_index.core.base.llms.types import ToolCallBlock
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool, ToolMetadata

from llama_index.llms.blendrag import BlendLLM
from llama_index.llms.blendrag.errors import AnswerCutError

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


ADD = FunctionTool.from_defaults(add)
NOTHING = FunctionTool.from_defaults(lambda: "done", name="do_nothing", description="Does nothing.")


def test_call_is_read_and_the_text_around_it_kept(llm: BlendLLM, scripted: Any) -> None:
    scripted.answers = ["Let me see. " + CALL]
    response = llm.chat_with_tools([ADD], user_msg="2 + 3?")
    (call,) = llm.get_tool_calls_from_response(response)
    assert (call.tool_name, call.tool_kwargs) == ("add", {"a": 2, "b": 3})
    assert response.message.content == "Let me see. "
    assert response.message.additional_kwargs["tool_calls"][0]["function"]["name"] == "add"
    assert '"name": "add"' in scripted.prompts()[0]


def test_answer_without_a_call_is_an_error_only_where_one_is_expected(llm: BlendLLM) -> None:
    response = llm.chat_with_tools([ADD], user_msg="Hello?")
    assert llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
    with pytest.raises(ValueError, match="called no tool"):
        llm.get_tool_calls_from_response(response)


def test_call_in_tags_that_max_tokens_cut_is_none_and_the_answer_cut(make_llm: Any, scripted: Any) -> None:
    whole = "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n3\n</parameter>\n"
    scripted.answers = [whole + "</function>\n</tool_call>"]
    llm = make_llm(tool_parser="qwen3_coder")
    room = len(scripted.tokenizer.encode(whole[: whole.index("<parameter=b>")]))
    cut = llm.chat_with_tools([ADD], user_msg="2 + 3?", max_tokens=room)
    assert cut.raw["finish_reason"] == "length" and not cut.message.additional_kwargs.get("tool_calls")
    with pytest.raises(AnswerCutError):
        llm.get_tool_calls_from_response(cut)
    assert whole.startswith(cut.raw["invalid_tool_calls"][0]["text"])
    assert llm.get_tool_calls_from_response(llm.chat_with_tools([ADD], user_msg="2 + 3?"))


@pytest.mark.parametrize("options", [{"tool_required": True}, {"tool_choice": "add"}])
def test_required_call_is_forced_by_grammar(llm: BlendLLM, scripted: Any, options: dict[str, Any]) -> None:
    scripted.answers = ['{"name": "add", "arguments": {"a": 2, "b": 3}}']
    response = llm.predict_and_call([ADD], user_msg="2 + 3?", **options)
    assert response.response == "5"
    grammar = scripted.asked[0].sampling.grammar
    assert grammar.kind == "json"
    assert grammar.value["properties"]["name"] == {"const": "add"}
    assert grammar.value["properties"]["arguments"]["required"] == ["a", "b"]


async def test_every_way_to_call_a_tool_calls_it(llm: BlendLLM, scripted: Any) -> None:
    scripted.answers = [CALL]
    responses = [
        llm.chat_with_tools([ADD], user_msg="?"),
        await llm.achat_with_tools([ADD], user_msg="?"),
        list(llm.stream_chat_with_tools([ADD], user_msg="?"))[-1],
        [one async for one in await llm.astream_chat_with_tools([ADD], user_msg="?")][-1],
    ]
    for response in responses:
        (call,) = llm.get_tool_calls_from_response(response)
        assert call.tool_kwargs == {"a": 2, "b": 3}
        assert not response.message.content
    assert (await llm.apredict_and_call([ADD], user_msg="?")).response == "5"


def test_second_call_is_left_out_where_parallel_calls_are_not_allowed(llm: BlendLLM, scripted: Any) -> None:
    scripted.answers = [CALL + CALL]
    calls = llm.get_tool_calls_from_response
    assert len(calls(llm.chat_with_tools([ADD], user_msg="?", allow_parallel_tool_calls=True))) == 2
    assert len(calls(llm.chat_with_tools([ADD], user_msg="?", allow_parallel_tool_calls=False))) == 1
    scripted.answers = [(CALL + CALL).replace('"add"', '"addd"')]
    assert len(calls(llm.chat_with_tools([ADD], user_msg="?", allow_parallel_tool_calls=False))) == 1


def test_tool_with_a_name_that_openai_would_refuse_is_found(llm: BlendLLM, scripted: Any) -> None:
    odd = FunctionTool(
        add, metadata=ToolMetadata(name="Add[int]", description="Adds.", fn_schema=ADD.metadata.fn_schema)
    )
    scripted.answers = ['<tool_call>{"name": "Add[int]", "arguments": {"a": 1, "b": 1}}</tool_call>']
    assert llm.predict_and_call([odd], user_msg="?").response == "2"


def test_history_of_calls_and_results_reaches_the_model(llm: BlendLLM, scripted: Any) -> None:
    call = ToolCallBlock(tool_call_id="c1", tool_name="add", tool_kwargs={"a": 2, "b": 3})
    result = ChatMessage("5", role="tool", additional_kwargs={"tool_call_id": "c1"})
    history = [ChatMessage("2 + 3?"), ChatMessage([call], role="assistant"), result]
    llm.chat_with_tools([ADD], chat_history=history)
    as_openai = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
    foreign = ChatMessage("", role="assistant", additional_kwargs={"tool_calls": [as_openai]})
    llm.chat_with_tools([ADD], chat_history=[history[0], foreign, result])
    ours, theirs = scripted.prompts()
    assert ours == theirs
    assert (
        ours.index("2 + 3?") < ours.index('{"name": "add", "arguments": {"a": 2, "b": 3}}') < ours.rindex("5")
    )


@pytest.mark.parametrize("streaming", [True, False])
async def test_agent_calls_a_tool_and_answers(llm: BlendLLM, scripted: Any, streaming: bool) -> None:
    scripted.answers = [CALL, "It is 5."]
    agent = FunctionAgent(tools=[ADD, NOTHING], llm=llm, streaming=streaming)
    handler = agent.run("2 + 3?")
    results = [event async for event in handler.stream_events() if isinstance(event, ToolCallResult)]
    assert [str(result.tool_output) for result in results] == ["5"]
    assert str(await handler) == "It is 5."
    assert len(scripted.asked) == 2
    assert scripted.prompts()[1].index("tool_call") < scripted.prompts()[1].rindex("5")


@pytest.mark.parametrize("streaming", [True, False])
async def test_agent_tells_the_model_that_there_is_no_such_tool(
    llm: BlendLLM, scripted: Any, streaming: bool
) -> None:
    scripted.answers = [CALL.replace('"add"', '"addd"'), CALL, "It is 5."]
    handler = FunctionAgent(tools=[ADD], llm=llm, streaming=streaming).run("2 + 3?")
    results = [event async for event in handler.stream_events() if isinstance(event, ToolCallResult)]
    assert [str(result.tool_output) for result in results] == [
        "Tool addd not found. Please select a tool that is available.",
        "5",
    ]
    assert str(await handler) == "It is 5."
    assert "Tool addd not found" in scripted.prompts()[1]


@pytest.mark.parametrize("streaming", [True, False])
async def test_agent_does_not_end_with_a_call_that_cannot_be_read(
    llm: BlendLLM, scripted: Any, streaming: bool
) -> None:
    broken = CALL.replace("}}", "")
    scripted.answers = [broken]
    agent = FunctionAgent(tools=[ADD], llm=llm, streaming=streaming)
    with pytest.raises(AnswerCutError, match=r"cannot be read, ask again \(not a JSON object"):
        await agent.run("2 + 3?")
    scripted.answers = ["It is 5. " + broken]
    assert str(await agent.run("2 + 3?")).strip() == "It is 5."
    scripted.answers = [broken + CALL, "It is 5."]
    assert str(await agent.run("2 + 3?")) == "It is 5."


async def test_call_of_a_tool_that_there_is_not_counts_as_none_where_no_agent_asks(
    llm: BlendLLM, scripted: Any
) -> None:
    unknown = CALL.replace('"add"', '"addd"')
    for answer, said in ((unknown, ""), (CALL + unknown, "5"), (unknown + CALL, "5")):
        for parallel in (False, True):
            scripted.answers = [answer]
            options = {"allow_parallel_tool_calls": parallel, "error_on_no_tool_call": False}
            assert llm.predict_and_call([ADD], user_msg="?", **options).response == said
            assert (await llm.apredict_and_call([ADD], user_msg="?", **options)).response == said
    scripted.answers = [unknown]
    with pytest.raises(ValueError, match="called no tool"):
        llm.predict_and_call([ADD], user_msg="?")


async def test_workflow_hands_over_between_agents(llm: BlendLLM, scripted: Any) -> None:
    scripted.answers = [
        '<tool_call>{"name": "handoff", "arguments": {"to_agent": "adder", "reason": "sums"}}</tool_call>',
        CALL,
        "It is 5.",
    ]
    first = FunctionAgent(
        name="first", description="Greets.", tools=[NOTHING], llm=llm, can_handoff_to=["adder"]
    )
    adder = FunctionAgent(name="adder", description="Adds.", tools=[ADD], llm=llm)
    workflow = AgentWorkflow(agents=[first, adder], root_agent="first")
    assert str(await workflow.run("2 + 3?")) == "It is 5."


def test_list_of_calls_whose_last_was_cut_is_not_taken_for_whole(make_llm: Any, scripted: Any) -> None:
    scripted.answers = [CALL + CALL]
    llm = make_llm()
    llm.max_tokens = len(llm.token_ids(CALL)) + 8
    with pytest.raises(AnswerCutError):
        llm.predict_and_call([ADD], user_msg="?", allow_parallel_tool_calls=True)
    assert llm.predict_and_call([ADD], user_msg="?", allow_parallel_tool_calls=False).response == "5"


@pytest.mark.parametrize("streaming", [True, False])
async def test_agent_does_not_end_with_a_cut_call(make_llm: Any, scripted: Any, streaming: bool) -> None:
    scripted.answers = ["Let me see. " + CALL]
    agent = FunctionAgent(tools=[ADD], llm=make_llm(max_tokens=16), streaming=streaming)
    with pytest.raises(AnswerCutError):
        await agent.run("2 + 3?")


@pytest.mark.parametrize("mark", ["", "[1] ", "[see below] "])
async def test_long_text_beside_tools_is_no_cut_call(make_llm: Any, scripted: Any, mark: str) -> None:
    scripted.answers = [f"{mark}A battery lasts for years, if it is kept in the cool, and is not run down."]
    agent = FunctionAgent(tools=[ADD], llm=make_llm(max_tokens=9))
    assert str(await agent.run("How long?")).startswith(f"{mark}A battery lasts for")


@pytest.mark.parametrize("begin", ["{", '{"name": "add', '[{"name": "add", "arg'])
async def test_bare_call_that_was_cut_is_one(make_llm: Any, scripted: Any, begin: str) -> None:
    llm = make_llm()
    llm.max_tokens = len(llm.token_ids(begin))
    scripted.answers = [f'{begin}ument": 1, "x": {{"y": 3}}']
    with pytest.raises(AnswerCutError):
        await FunctionAgent(tools=[ADD], llm=llm).run("2 + 3?")
