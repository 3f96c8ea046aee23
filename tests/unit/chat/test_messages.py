"""Messages that a chat template takes."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import asdict
from datetime import date
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.chat.messages import fit_template, merge_runs, with_roles
from blendrag.chat.request import make_request
from blendrag.chat.tools import TemplateFacts
from blendrag.errors import BlendragWarning, ConfigError, ModelError
from blendrag.settings import Settings

ALTERNATING = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}"
)
PASSING_OVER = (  # as templates of SmolLM3 and gpt-oss do with what they do not expect
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}\n{% endif %}"
    "{% for m in messages if m.role in ('user', 'assistant') %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
)
ONLY_FIRST = (  # as Qwen 3.5's does
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}"
)
REFUSING = "{{ raise_exception('never') }}"
_CALL = "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endif %}"
FIRST_CALL = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + _CALL + "{% endfor %}"
)  # as gpt-oss's does
ONE_CALL = (  # as Llama 3's does
    "{% for m in messages if m.tool_calls and m.tool_calls | length > 1 %}"
    "{{ raise_exception('one at once') }}{% endfor %}" + FIRST_CALL
)


@pytest.fixture
def strict(with_template: Any) -> Any:
    return with_template(ALTERNATING)


def say(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def taken(tokenizer: Any) -> dict[str, bool]:
    facts = asdict(TemplateFacts.of(tokenizer))
    return {name: facts[f"takes_{name}"] for name in ("system", "later", "welcome", "calls")}


def test_runs_of_one_role_are_joined_and_what_was_given_stays() -> None:
    messages = [
        say("system", "a"),
        say("system", "b"),
        say("user", "c"),
        say("user", "d"),
        say("critic", "e"),
    ]
    before = deepcopy(messages)
    assert merge_runs(messages) == [say("system", "a\nb"), say("user", "c\nd"), say("critic", "e")]
    assert messages == before


def test_results_of_two_tools_stay_two() -> None:
    results = [say("tool", "1", tool_call_id="x"), say("tool", "2", tool_call_id="y")]
    assert merge_runs(results) == results


def test_calls_of_merged_messages_are_kept() -> None:
    one, two = {"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}
    merged = merge_runs([say("assistant", "", tool_calls=[one]), say("assistant", "x", tool_calls=[two])])
    assert merged == [say("assistant", "x", tool_calls=[one, two])]


def test_thinking_of_merged_messages_is_kept() -> None:
    one, two = (say("assistant", f"Say {n}.", reasoning_content=f"Think {n}.") for n in (1, 2))
    assert merge_runs([one, two]) == [
        say("assistant", "Say 1.\nSay 2.", reasoning_content="Think 1.\nThink 2.")
    ]
    assert merge_runs([say("assistant", "a"), two])[0]["reasoning_content"] == "Think 2."
    assert merge_runs([one, say("assistant", "a")])[0]["reasoning_content"] == "Think 1."


def test_template_without_system_role_gets_it_in_the_first_turn(strict: Any) -> None:
    fitted = fit_template(strict, [say("system", "Be brief."), say("user", "Hello")])
    assert fitted == [say("user", "Be brief.\nHello")]


def test_template_that_wants_turns_gets_them_with_tools_and_an_assistant_who_begins(strict: Any) -> None:
    fitted = fit_template(strict, [say("assistant", "Welcome"), say("system", "s"), say("tool", "42")])
    assert [message["role"] for message in fitted] == ["user", "assistant", "user"]
    assert fitted[2]["content"] == "s\n42"


@pytest.mark.parametrize("template", [PASSING_OVER, ONLY_FIRST])
def test_system_message_behind_others_is_lost_in_no_template(strict: Any, template: str) -> None:
    strict.chat_template = template
    talk = [say("system", "s"), say("user", "Hi"), say("assistant", "Hello"), say("system", "In French.")]
    fitted = fit_template(strict, [*talk, say("user", "And?")])
    assert fitted == [*talk[:3], say("user", "In French.\nAnd?")]


@pytest.mark.parametrize("template", [FIRST_CALL, ONE_CALL])
def test_calls_at_once_come_one_by_one_where_the_template_takes_no_more(strict: Any, template: str) -> None:
    strict.chat_template = template
    one, two = ({"id": n, "function": {"name": "f", "arguments": {"n": n}}} for n in "12")
    results = [say("tool", "second", tool_call_id="2"), say("tool", "first", tool_call_id="1")]
    talk = [say("user", "Hi"), say("assistant", "", tool_calls=[one, two]), *results]
    apart = [say("assistant", "", tool_calls=[call]) for call in (one, two)]
    assert fit_template(strict, talk) == [talk[0], apart[0], results[1], apart[1], results[0]]
    assert with_roles(talk, **taken(strict)) == fit_template(strict, talk)


def test_user_who_speaks_behind_a_tools_result_is_answered_before_where_turns_alternate(strict: Any) -> None:
    strict.chat_template = (  # as Mistral's does
        "{% set ns = namespace(at=0) %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% if m.role != 'tool' and not m.tool_calls %}{% if (m.role == 'user') != (ns.at % 2 == 0) %}"
        "{{ raise_exception('roles alternate') }}{% endif %}{% set ns.at = ns.at + 1 %}{% endif %}"
        "{% endfor %}"
    )
    call = say("assistant", "", tool_calls=[{"id": "1"}])
    talk = [say("user", "Hi"), call, say("tool", "42", tool_call_id="1"), say("user", "And?")]
    assert fit_template(strict, talk) == [*talk[:3], say("assistant", "…"), talk[3]]


def test_role_that_the_template_passes_over_is_the_users(strict: Any) -> None:
    strict.chat_template = PASSING_OVER
    fitted = fit_template(strict, [say("user", "Hi"), say("critic", "Too short."), say("user", "Again.")])
    assert fitted == [say("user", "Hi\nToo short.\nAgain.")]


def test_content_that_no_form_shows_costs_no_other(strict: Any) -> None:
    strict.chat_template = "{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}"
    talk = [say("system", "s"), say("user", "Hi"), say("assistant", "Hello")]
    assert fit_template(strict, talk) == talk
    strict.chat_template = (
        "{% for m in messages %}{% if m.role != 'assistant' and (loop.first or m.role != 'system') %}"
        "{{ m.content }}{% endif %}{% endfor %}"
    )
    more = [*talk, say("system", "In French."), say("user", "And?")]
    assert fit_template(strict, more) == [*talk, say("user", "In French.\nAnd?")]


def test_template_that_takes_nothing_is_a_clear_error(strict: Any) -> None:
    strict.chat_template = REFUSING
    with pytest.raises(ModelError, match="never"):
        fit_template(strict, [say("user", "Hello")])


roles = st.sampled_from(["system", "user", "assistant", "tool"])
histories = st.lists(st.tuples(roles, st.text(min_size=1)), min_size=1)


@given(histories)
def test_contents_stay_whole_and_in_order(history: list[tuple[str, str]]) -> None:
    merged = merge_runs([say(role, content) for role, content in history])
    assert "\n".join(m["content"] for m in merged) == "\n".join(content for _, content in history)


@pytest.mark.parametrize(
    "roles",
    ["system user", "assistant user", "system assistant user", "system user assistant system user"],
)
def test_client_of_a_server_sends_the_messages_that_it_would_compute(
    tokenizer: Any, with_template: Any, roles: str
) -> None:
    messages = [say(role, f"{number}") for number, role in enumerate(roles.split())]
    for template in (tokenizer.chat_template, ALTERNATING, PASSING_OVER, ONLY_FIRST):
        one = with_template(template)
        assert with_roles(messages, **taken(one)) == fit_template(one, messages)


def made(*messages: Any) -> Any:
    return make_request(Settings.load(), messages, {}).messages


def test_message_of_chat_completions_is_read_in_each_of_its_forms() -> None:
    parts = [{"type": "text", "text": "Sky"}, {"type": "input_text", "text": "or sea?"}]
    assert made({"role": "user", "content": parts})[0]["content"] == "Sky\nor sea?"
    call = {"id": "1", "name": "look", "arguments": {"at": "sky"}}
    function = {"name": "look", "arguments": '{"at": "sky"}'}
    langchains = {"id": "1", "name": "look", "args": {"at": "sky"}}
    for written in (call, {"id": "1", "type": "function", "function": function}, langchains):
        assert made({"role": "assistant", "content": None, "tool_calls": [written]})[0]["tool_calls"] == [
            call
        ]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("Sky?", "a message is"),
        ({"content": "Sky?"}, "a message is"),
        ({"role": 3, "content": "Sky?"}, "a message is"),
        ({"role": "user", "content": 3}, "content is text"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}, "'image_url'"),
        ({"role": "user", "content": [None]}, "'NoneType'"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "a tool call is"),
        ({"role": "assistant", "tool_calls": ["look"]}, "a tool call is"),
        ({"role": "assistant", "tool_calls": [{"name": "look", "arguments": [1]}]}, "a tool call is"),
        ({"role": "user", "parts": [{"text": "Sky?"}]}, "a message is"),
    ],
)
def test_what_is_no_message_is_named(message: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(message)


def test_what_was_answered_already_and_what_models_and_tools_showed_ends_no_conversation() -> None:
    picture = {"type": "image_url", "image_url": {"url": "u"}}
    shown = {"role": "user", "content": [picture, {"type": "text", "text": "Sky?"}]}
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}, {"type": "thinking"}]}
    call = {"role": "assistant", "tool_calls": [{"id": "1", "name": "look", "arguments": {}}]}
    result = {
        "role": "tool",
        "tool_call_id": "1",
        "content": [picture, {"image_url": "u"}, {"of": b"1"}, None],
    }
    with pytest.warns(BlendragWarning, match="left out content of type"):
        texts = [one.get("content") for one in made(shown, refused, say("user", "Sea?"), call, result)]
    assert texts == ["Sky?", "No.", "Sea?", None, ""]
    with pytest.raises(ConfigError, match="image_url"):
        made(refused, shown, call, say("tool", "blue"))


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ({"role": "assistant", "content": None, "refusal": "No."}, say("assistant", "No.")),
        ({"role": "assistant", "audio": {"id": "a", "transcript": "Aye."}}, say("assistant", "Aye.")),
        ({"role": "assistant", "content": "Blue.", "refusal": None}, say("assistant", "Blue.")),
        (say("assistant", "Blue.", reasoning="Hm."), say("assistant", "Blue.", reasoning_content="Hm.")),
        (say("developer", "Be brief."), say("system", "Be brief.")),
        (
            {
                "role": "assistant",
                "content": None,
                "function_call": {"name": "look", "arguments": '{"x": 1}'},
            },
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "look", "name": "look", "arguments": {"x": 1}}],
            },
        ),
        (say("function", "sky", name="look"), say("tool", "sky", name="look", tool_call_id="look")),
        (say("user", ["Sky,", ["sea"], {"text": "or land?"}]), say("user", "Sky,\nsea\nor land?")),
        (say("tool", {"seen": ["sky"]}), say("tool", '{"seen": ["sky"]}')),
        (say("tool", [{"seen": "sky"}, "sea"]), say("tool", '[{"seen": "sky"}, "sea"]')),
        (say("tool", [["sky", 1], ["sea", 2]]), say("tool", '[["sky", 1], ["sea", 2]]')),
        (say("tool", [1, 2]), say("tool", "[1, 2]")),
        (say("tool", [{"image_url": "u", "of": 1}]), say("tool", '[{"image_url": "u", "of": 1}]')),
        (say("tool", True), say("tool", "true")),
        (say("tool", [{"text": "sea", "id": 1}]), say("tool", '[{"text": "sea", "id": 1}]')),
        (say("tool", ["sky", {"text": "se\na"}]), say("tool", "sky\nse\na")),
        (say("tool", {"on": date(2026, 1, 2)}), say("tool", '{"on": "2026-01-02"}')),
        (say("tool", None), say("tool", "")),
    ],
)
def test_message_of_any_age_of_openais_is_read(message: Any, read: Any) -> None:
    assert made(message) == [read]


@pytest.mark.parametrize("arguments", ["[1]", '"{}"', '{"x": ', "", None])
def test_call_that_a_model_wrote_wrong_ends_no_conversation(arguments: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    (read,) = made({"role": "assistant", "tool_calls": [call]})
    assert read["tool_calls"] == [{"id": "1", "name": "look", "arguments": {}}]


@pytest.mark.parametrize("name", ["stop", "documents"])
def test_one_text_is_one_and_what_is_none_is_named(name: str) -> None:
    def given(value: Any) -> Any:
        options: Any = {name: value}
        request = make_request(Settings.load(), "Sky?", options)
        return request.sampling.stop if name == "stop" else request.documents

    assert given("sea") == ("sea",) == given(iter(["sea"]))
    for wrong in (3, [None], [["sea"]]):
        with pytest.raises(ConfigError, match=f"{name} has to be texts"):
            given(wrong)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_tokens", 0), ("max_tokens", 2.5), ("max_tokens", "many"), ("max_retries", -1),
        ("max_retries", "1"), ("temperature", "hot"), ("temperature", float("nan")), ("top_p", -1),
        ("timeout", "soon"),
    ],
)  # fmt: skip
def test_number_that_cannot_be_used_is_refused_by_the_name_of_its_option(option: Any, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{option} has to be a .*number of at least"):
        make_request(Settings(), "text", {option: value})
