"""A client of a server that answers: over real connections."""

from __future__ import annotations

import asyncio
import copy
import datetime
import json
import pickle
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from blendrag import Evidence, RemoteChat, errors, open_chat
from blendrag.cli.app import app
from blendrag.remote import chat as remote
from scripted_server import EVIDENCE, MODEL, Reply, Script, event, events

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
HI = [{"role": "user", "content": "Hi"}]


def body(server: Script) -> dict[str, Any]:
    return server.asked[-1][2]


def test_answer_has_its_text_usage_and_evidence(server: Script, chat: RemoteChat) -> None:
    server.replies = [events("It is", " blue.")]
    pieces = list(chat.stream(chat.request(HI, documents=["A sky."], conversation="c1", recompute_ratio=0.5)))
    assert [piece.text for piece in pieces] == ["It is", " blue.", ""]
    answer = pieces[-1].answer
    assert answer is not None
    assert (answer.text, answer.model, answer.finish_reason) == ("It is blue.", "served", "stop")
    stored = EVIDENCE["stored"]
    assert answer.evidence == Evidence(**{name: EVIDENCE[name] for name in EVIDENCE if name != "stored"})
    assert (answer.usage.input, answer.usage.output, answer.usage.cache_creation) == (9, 2, stored)
    said = {"documents": ["A sky."], "conversation": "c1", "recompute_ratio": 0.5, "evidence": True}
    assert body(server)["blendrag"] == said


async def test_async_answer_is_the_same(server: Script, chat: RemoteChat) -> None:
    server.replies = [events("It is", " blue."), events("It is", " blue.")]
    answer = await chat.acomplete(chat.request(HI))
    assert answer.text == "It is blue."
    assert answer.evidence == chat.complete(chat.request(HI)).evidence


def test_client_works_in_another_loop_and_process(server: Script, chat: RemoteChat) -> None:
    server.replies = [events("a") for _ in range(4)]
    for _ in range(2):
        assert asyncio.run(chat.acomplete(chat.request(HI))).text == "a"
    for other in (pickle.loads(pickle.dumps(chat)), copy.deepcopy(chat)):
        assert other.complete(other.request(HI)).text == "a"


def test_connections_of_ended_loops_are_dropped(server: Script, chat: RemoteChat) -> None:
    server.replies = [events("a") for _ in range(8)]
    for _ in range(8):
        asyncio.run(chat.acomplete(chat.request(HI)))
    assert len(chat.server._clients) == 1


async def test_close_ends_connections_of_a_running_loop(server: Script, chat: RemoteChat) -> None:
    server.replies = [events("a")]
    await chat.acomplete(chat.request(HI))
    (client,) = chat.server._clients.values()
    chat.close()
    await asyncio.sleep(0.05)
    assert client.is_closed


def test_line_separators_of_other_alphabets_cut_no_event(server: Script, chat: RemoteChat) -> None:
    text = "one\u2028two\x85three\x0bfour"
    server.replies = [events(text)]
    assert chat.complete(chat.request(HI)).text == text


@pytest.mark.parametrize("own", ["retry: 3000", "id: 1", "event: ping", "data:", "data: ", ": alive"])
def test_event_without_data_says_nothing_of_the_answer(server: Script, chat: RemoteChat, own: str) -> None:
    reply = events("It is", " blue.")
    reply.lines = [f"{own}\n\n{line}" for line in reply.lines]
    server.replies = [reply]
    assert chat.complete(chat.request(HI)).text == "It is blue."


@pytest.mark.parametrize("end", ["[DONE] \n\n", "[DONE]", "[DONE]\n"])
def test_end_of_the_answer_is_known_however_it_is_written(server: Script, chat: RemoteChat, end: str) -> None:
    reply = events("It is", " blue.")
    reply.lines[-1] = f"data: {end}"
    server.replies = [reply]
    assert chat.complete(chat.request(HI, max_retries=0)).text == "It is blue."


@pytest.mark.parametrize("later", ["data: bye\n\n", 'data: {"error": {"message": "late"}}\n\n', ": bye\n\n"])
@pytest.mark.parametrize("cut", [True, False])
async def test_answer_is_whole_whatever_comes_behind_its_end(
    server: Script, chat: RemoteChat, later: str, cut: bool
) -> None:
    reply = events("It is", " blue.", cut=cut)
    reply.lines.append(later)
    server.replies = [reply, reply]
    assert chat.complete(chat.request(HI, max_retries=0)).text == "It is blue."
    assert (await chat.acomplete(chat.request(HI, max_retries=0))).text == "It is blue."


def test_part_of_a_call_without_a_number_is_of_the_first(server: Script, chat: RemoteChat) -> None:
    reply = events()
    for part in ({"function": {"name": "add", "arguments": '{"a":'}}, {"function": {"arguments": "1}"}}):
        reply.lines.insert(-4, event(delta={"tool_calls": [part]}))
    server.replies = [reply]
    (call,) = chat.complete(chat.request(HI, tools=[TOOL])).tool_calls
    assert (call.name, call.arguments) == ("add", {"a": 1})


def test_halves_of_characters_are_sent_as_what_encoders_take(server: Script, chat: RemoteChat) -> None:
    told = [Reply(lines=[said]) for said in ('{"token_ids": [[1]]}', '{"pieces": [["x"]]}')]
    server.replies = [*told, events("a")]
    assert chat.token_ids("a\ud800") == [1]
    assert chat.split("a\ud800") == ["x"]
    chat.complete(chat.request(HI, other={"bad_words": ["a\ud800"]}))
    sent = [body["texts"] for _, path, body in server.asked if path in ("/v1/kb/tokens", "/v1/kb/split")]
    assert [*sent, body(server)["bad_words"]] == [["a\ufffd"]] * 3


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("frequency_penalty", lambda number: {"other": {"frequency_penalty": number}}),
        ("logit_bias", lambda number: {"other": {"logit_bias": {"1": number}}}),
        ("temperature", lambda number: {"temperature": number}),
        ("chat_template_kwargs", lambda number: {"chat_template_kwargs": {"x": [number]}}),
    ],
)
def test_number_that_json_has_not_is_refused_by_its_options_name(
    server: Script, chat: RemoteChat, name: str, said: Any, number: float
) -> None:
    with pytest.raises(errors.ConfigError, match=f"{name} has"):
        chat.complete(chat.request(HI, **said(number)))
    if name == "chat_template_kwargs":
        with pytest.raises(errors.ConfigError, match=name):
            chat.count_tokens(chat.request(HI, **said(number)))


async def test_timeout_without_end_is_no_limit(server: Script, chat: RemoteChat) -> None:
    server.replies = [events("a"), events("a")]
    assert chat.complete(chat.request(HI, timeout=float("inf"))).text == "a"
    assert (await chat.acomplete(chat.request(HI, timeout=1e300))).text == "a"


@pytest.mark.parametrize(
    "tail", ["", "/", "/v1", "/v1/", "/v1/chat/completions", "/v1/completions/", "/chat/completions", " \n"]
)
@pytest.mark.parametrize("path", ["", "/api", "/v1/api"])
def test_url_is_taken_as_it_was_copied(path: str, tail: str) -> None:
    assert str(RemoteChat(f" http://host:1{path}{tail}").server) == f"http://host:1{path}/"


def test_only_what_was_said_is_sent(
    server: Script, chat: RemoteChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.replies = [events("a"), events("a"), events("a"), events("a")]
    chat.complete(chat.request(HI))
    assert body(server)["blendrag"] == {"documents": [], "evidence": True}
    assert "model" not in body(server)
    monkeypatch.setenv("BLENDRAG_QUALITY", "close")
    named = RemoteChat(server.url, model="mine")
    named.complete(named.request(HI))
    assert body(server)["model"] == "mine"
    assert body(server)["blendrag"]["quality"] == "close"
    named.complete(named.request(HI, quality="fast"))
    said = {"documents": [], "evidence": True, "quality": "fast"}
    assert body(server)["blendrag"] == said
    own: Any = {"kv_budget": "512:alpha=0.2", "selector": "hkvd@0.4", "trace": True}
    named.complete(named.request(HI, **own))
    said = {"quality": "close", **own, "selector": "hkvd", "recompute_ratio": 0.4}
    assert body(server)["blendrag"].items() >= said.items()


def test_sampling_is_sent(server: Script, chat: RemoteChat) -> None:
    server.replies = [events("a")]
    options: Any = {"temperature": 0.5, "top_p": 0.9, "stop": "x", "seed": 3, "max_tokens": 7, "logprobs": 2}
    other = {"top_k": 4, "min_p": 0.1, "thinking_token_budget": 64, "repetition_detection": {"min_count": 3}}
    chat.complete(chat.request(HI, **options, other=other))
    asked = body(server)
    assert asked["stop"] == ["x"]
    same = {name: value for name, value in options.items() if name not in ("stop", "logprobs")}
    assert {name: asked[name] for name in same} == same
    assert {name: asked[name] for name in other} == other
    assert (asked["logprobs"], asked["top_logprobs"]) == (True, 2)


def test_variable_of_the_template_that_json_does_not_know_is_written(
    server: Script, chat: RemoteChat
) -> None:
    server.replies = [events("a")]
    chat.complete(chat.request(HI, chat_template_kwargs={"day": datetime.date(2024, 1, 2)}))
    assert body(server)["chat_template_kwargs"] == {"day": "2024-01-02"}


def test_tools_need_no_parser_of_the_server(server: Script, chat: RemoteChat) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'
    server.replies = [events("So: ", *call), events('{"name": "add", "arguments": {"a": 4}}')]
    pieces = list(chat.stream(chat.request(HI, tools=[TOOL])))
    assert "".join(piece.text for piece in pieces) == "So: "
    answer = pieces[-1].answer
    assert answer is not None and answer.finish_reason == "tool_calls"
    assert [(one.name, one.arguments) for one in answer.tool_calls] == [("add", {"a": 3})]
    system, *_ = body(server)["messages"]
    assert '"name": "add"' in system["content"] and "tools" not in body(server)

    (forced,) = chat.complete(chat.request(HI, tools=[TOOL], tool_choice="add")).tool_calls
    assert forced.arguments == {"a": 4}
    assert body(server)["structured_outputs"]["json"]["properties"]["name"] == {"const": "add"}


@pytest.mark.parametrize("native", [False, True])
def test_parser_of_the_server_is_used(
    native: bool, server: Script, chat: RemoteChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODEL, "tool_parser", "hermes")
    monkeypatch.setitem(MODEL, "template", {**MODEL["template"], "knows_tools": native})
    assert chat.tool_parser == "hermes"
    calls = events("So: ")
    for at, name, text in ((0, "add", '{"a"'), (0, None, ": 3}"), (1, "add", '{"a": 4}'), (2, "add", '{"a')):
        part = {"index": at, "function": {"name": name, "arguments": text}}
        calls.lines.insert(-4, event(delta={"tool_calls": [part]}))
    server.replies = [calls] * 3
    for one in (False, True):
        pieces = list(chat.stream(chat.request(HI, tools=[TOOL], parallel_tool_calls=not one)))
        asked, answer = body(server), pieces[-1].answer
        assert (asked["tool_choice"], asked["parallel_tool_calls"]) == ("auto", not one)
        assert [tool["function"]["name"] for tool in asked["tools"]] == ["add"]
        assert ("add" in str(asked["messages"])) != native
        assert answer is not None and answer.finish_reason == "tool_calls"
        assert [call.arguments for call in answer.tool_calls] == [{"a": 3}, {"a": 4}][: 1 if one else None]
        assert [call.text for call in answer.invalid_tool_calls] == ([] if one else ['add {"a'])
        assert answer.text == "".join(piece.text for piece in pieces) == "So: "
    chat.complete(chat.request(HI, tools=[TOOL], tool_choice="add"))
    assert body(server).get("tool_choice", "none") == "none" and body(server)["structured_outputs"]


def test_control_tokens_in_calls_are_no_markup(server: Script, chat: RemoteChat) -> None:
    server.replies = [events("a")]
    call = {"id": "x", "name": "add", "arguments": {"a": "<|im_end|>"}}
    history = [*HI, {"role": "assistant", "content": "a<|im_end|>", "tool_calls": [call]}]
    chat.complete(chat.request(history, tools=[TOOL]))
    assert "<|im_end|>" not in str(body(server)["messages"])
    assert "im_end|>" in str(body(server)["messages"])


def test_reasoning_is_told_from_the_text(server: Script, chat: RemoteChat) -> None:
    reply = events("Blue.")
    reply.lines.insert(1, event(delta={"reasoning": "Look up."}))
    server.replies = [reply]
    first, *_, last = chat.stream(chat.request(HI))
    assert (first.text, first.reasoning) == ("", "Look up.")
    assert last.answer is not None
    assert (last.answer.text, last.answer.reasoning) == ("Blue.", "Look up.")


def test_rendered_prompt_is_a_completion(server: Script, chat: RemoteChat) -> None:
    reply = events()
    reply.lines.insert(1, event(text="Paris"))
    planned = {"text": "The capital is", "tokens": 3, "rows": [], "plain": None}
    server.replies = [Reply(lines=[json.dumps(planned)]), reply]
    assert chat.complete(chat.request("The capital is")).text == "Paris"
    assert server.asked[-1][1] == "/v1/completions"
    assert body(server)["prompt"] == "The capital is"
    assert body(server)["max_tokens"] == MODEL["context_window"] - 3  # said nothing, vLLM takes 16


def test_answer_has_the_rest_of_the_window_unless_the_request_says_less(
    server: Script, chat: RemoteChat
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    server.replies = [events("x") for _ in range(2)]
    for limit, characters in ((None, MODEL["context_window"]), (20, 40)):
        chat.complete(chat.request(HI, schema=schema, max_tokens=limit))
        assert body(server).get("max_tokens") == limit
        held = body(server)["structured_outputs"]["json"]["properties"]["a"]
        assert held["maxLength"] == characters


def test_requests_go_through_the_callers_client_with_the_callers_headers_and_query(server: Script) -> None:
    server.replies = [events("a"), events("a")]
    seen: list[httpx2.Request] = []

    async def aseen(request: httpx2.Request) -> None:
        seen.append(request)

    http = {
        "headers": {"Authorization": "Basic x", "X-Team": "maps"},
        "query": {"api-version": "2"},
        "client": httpx2.Client(event_hooks={"request": [seen.append]}),
        "async_client": httpx2.AsyncClient(event_hooks={"request": [aseen]}),
    }
    chat = RemoteChat(server.url, "key", http=http)
    assert chat.complete(chat.request(HI)).text == "a"
    assert asyncio.run(chat.acomplete(chat.request(HI))).text == "a"
    chat.close()
    assert not http["client"].is_closed, "it is the caller's"
    assert [request.url.path for request in seen].count("/v1/chat/completions") == 2
    for request in seen:
        assert request.url.params["api-version"] == "2" and request.headers["x-team"] == "maps"
        assert request.headers.get_list("authorization") == ["Basic x"]


def test_client_of_another_kind_is_refused() -> None:
    for wrong in ({"client": object()}, {"client": httpx2.AsyncClient()}):
        with pytest.raises(errors.ConfigError, match="go through an httpx2"):
            RemoteChat("http://localhost:1", http=wrong)


# -- options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temprature": 1}, "did you mean temperature"),
        ({"hints": ["x"]}, "documents now"),
        ({"recompute_ratio": 3}, "between 0 and 1"),
        ({"quality": "fst"}, "quality must be"),
        ({"tool_choice": "none_such"}, "names no tool"),
        ({"other": {"repetition_penalti": 1.0}}, "did you mean repetition_penalty"),
    ],
)
def test_wrong_option_is_not_sent(server: Script, chat: RemoteChat, options: Any, said: str) -> None:
    with pytest.raises(errors.ConfigError, match=said):
        chat.request(HI, **options)
    assert not server.asked


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kv_cache_gib": 4}, "kv_cache_gib is the server's"),
        ({"codec": "int8"}, "codec is the server's"),
        ({"temprature": 1}, "did you mean"),
    ],
)
def test_setting_of_the_server_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(errors.ConfigError, match=said):
        RemoteChat("http://localhost:1", **given)


def test_folder_of_a_server_is_refused_to_its_client(tmp_path: Any) -> None:
    with pytest.raises(errors.ConfigError, match="kv_dir"):
        open_chat({}, kv_dir=tmp_path, base_url="http://localhost:1")


@pytest.mark.parametrize("parser", ["", "mistral"])
def test_doctor_says_who_reads_calls(parser: str, server: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODEL, "tool_parser", parser)
    run = CliRunner().invoke(app, ["doctor", "--server", server.url, "--json"])
    about = {"model": "served", "context_window": 512, "knows_tools": False, "tool_parser": parser}
    assert json.loads(run.stdout) == about
    shown = CliRunner().invoke(app, ["doctor", "--server", server.url]).stdout
    assert ("'mistral', in the server" if parser else "by blendrag itself") in " ".join(shown.split())


def test_text_too_long_for_a_request_is_counted_and_split_in_parts(
    server: Script, chat: RemoteChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_TEXT_CHARACTERS", 8)
    for ask, said in ((chat.token_ids, '{"token_ids": [[1, 2]]}'), (chat.split, '{"pieces": [["x", "y"]]}')):
        server.replies = [Reply(lines=[said]) for _ in range(2)]
        assert len(ask("Blue sky. Red")) == 4
        assert [body["texts"] for *_, body in server.asked[-2:]] == [["Blue "], ["sky. Red"]]


@given(st.text("a \n", max_size=60))
def test_text_too_long_for_a_request_is_cut_into_parts_of_it(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "_TEXT_CHARACTERS", 8)
        parts = list(remote._parts(text))
    assert "".join(parts) == text
    assert all(len(part) <= 8 for part in parts)
