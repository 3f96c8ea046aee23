"""Options by the names that LlamaIndex's other classes have for them."""

from __future__ import annotations

import ast
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.llms.openai import OpenAI
from llama_index.llms.openai_like import OpenAILike

from blendrag.errors import BlendragWarning, ConfigError
from llama_index.llms.blendrag import BlendLLM

HELLO = [ChatMessage("Hello?")]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}

Make = Callable[..., BlendLLM]

# What has no meaning without a value, or is another model's.
_OWN = {"model", "callback_manager", "max_tokens", "timeout", "api_base", "audio_config", "modalities"}
_OTHERS_PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5}
VLLM = {
    "temperature": 0.5, "tensor_parallel_size": 1, "trust_remote_code": False, "n": 1, "best_of": None,
    **_OTHERS_PENALTIES, "top_p": 0.5, "top_k": 5, "stop": ["."], "ignore_eos": True, "max_new_tokens": 9,
    "logprobs": 2, "dtype": "auto", "download_dir": None, "vllm_kwargs": {"max_model_len": 2048},
    "api_url": None, "is_chat_model": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_warning() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", BlendragWarning)
        yield


def asked(scripted: Any) -> Any:
    return scripted.asked[-1].sampling


def test_folder_of_no_name_is_the_usual_one() -> None:
    assert BlendLLM(kv_dir="").kv_dir is None  # type: ignore[arg-type]


def test_model_may_be_a_path_object() -> None:
    assert BlendLLM(model=Path("models/mine")).model == "models/mine"  # type: ignore[arg-type]


@pytest.mark.parametrize("other", [OpenAI, OpenAILike], ids=lambda other: other.__name__)
def test_arguments_of_openais_classes_are_taken(other: Any) -> None:
    made = other(model="gpt-4o-mini", api_key="none", max_tokens=9)
    fields = {name: getattr(made, name) for name in other.model_fields if name not in _OWN}
    llm = BlendLLM(**fields, max_tokens=9, timeout=60.0)
    assert (llm.max_tokens, llm.timeout, llm.max_retries) == (9, 60.0, made.max_retries)


def test_arguments_of_the_class_for_vllm_are_taken(make_llm: Make, scripted: Any) -> None:
    llm = make_llm(**VLLM)
    assert llm.metadata.context_window == 2048
    llm.complete("Hello?")
    sampling = asked(scripted)
    assert (sampling.temperature, sampling.top_p, sampling.stop) == (0.5, 0.5, (".",))
    assert (sampling.max_tokens, sampling.logprobs) == (9, 2)
    assert sampling.other == {**_OTHERS_PENALTIES, "ignore_eos": True, "top_k": 5}


BIASED = {"logit_bias": {"5": -1}, "min_tokens": 2}
NESTED = {"additional_kwargs": {"seed": 5, "extra_body": {"min_p": 0.2}}}
EMPTY = {"n": 1, "strict": True, "user": "ada", "stream": False, "service_tier": None}
FORMAT = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
OPTIONS: list[tuple[dict[str, Any], Callable[[Any], Any], Any]] = [
    (_OTHERS_PENALTIES, lambda s: s.other, _OTHERS_PENALTIES),
    ({"min_p": 0.1, "top_k": 3}, lambda s: s.other, {"min_p": 0.1, "top_k": 3}),
    (BIASED, lambda s: s.other, BIASED),
    ({"stop_sequences": ["!"]}, lambda s: s.stop, ("!",)),
    ({"stop": "!"}, lambda s: s.stop, ("!",)),
    ({"request_timeout": 7.0}, lambda s: s.timeout_s, 7.0),
    ({"max_new_tokens": 3}, lambda s: s.max_tokens, 3),
    ({"max_completion_tokens": 3}, lambda s: s.max_tokens, 3),
    ({"logprobs": True}, lambda s: s.logprobs, 1),
    ({"logprobs": True, "top_logprobs": 4}, lambda s: s.logprobs, 4),
    ({"logprobs": True, "top_logprobs": 0}, lambda s: s.logprobs, 0),
    ({"top_logprobs": 0}, lambda s: s.logprobs, None),
    ({"logprobs": False}, lambda s: s.logprobs, None),
    ({"extra_body": {"top_k": 3, "max_tokens": 4}}, lambda s: (s.other, s.max_tokens), ({"top_k": 3}, 4)),
    (NESTED, lambda s: (s.seed, s.other), (5, {"min_p": 0.2})),
    (EMPTY, lambda s: s.other, {}),
    ({"response_format": FORMAT}, lambda s: s.grammar.kind, "json"),
    ({"response_format": {"type": "json_object"}}, lambda s: s.grammar.kind, "json_object"),
]


@pytest.mark.parametrize(("options", "read", "wanted"), OPTIONS)
@pytest.mark.parametrize("per_call", [False, True], ids=["made with", "per call"])
def test_option_has_its_effect(
    make_llm: Make, scripted: Any, options: Any, read: Any, wanted: Any, per_call: bool
) -> None:
    llm = make_llm() if per_call else make_llm(**options)
    llm.chat(HELLO, **(options if per_call else {}))
    assert read(asked(scripted)) == wanted


def test_option_of_a_call_wins_by_whichever_name(make_llm: Make, scripted: Any) -> None:
    llm = make_llm(stop=["a"], additional_kwargs={"stop_sequences": ["b"], "max_new_tokens": 5}, top_p=0.5)
    llm.chat(HELLO)
    assert (asked(scripted).stop, asked(scripted).max_tokens, asked(scripted).top_p) == (("b",), 5, 0.5)
    llm.chat(HELLO, stop=["c"], max_tokens=3)
    assert (asked(scripted).stop, asked(scripted).max_tokens) == (("c",), 3)
    llm.chat(HELLO, stop=None, max_tokens=None)
    assert (asked(scripted).stop, asked(scripted).max_tokens) == (("b",), 5)


def test_effort_of_reasoning_is_the_templates(make_llm: Make) -> None:
    request = make_llm(reasoning_effort="none")._call(HELLO, {}).request
    assert request.chat_template_kwargs == {"reasoning_effort": "none", "enable_thinking": False}
    own = {"enable_thinking": False}
    request = make_llm()._call(HELLO, {"reasoning_effort": "low", "chat_template_kwargs": own}).request
    assert request.chat_template_kwargs == {"reasoning_effort": "low", "enable_thinking": False}


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "function": {"name": "look"}},
        {"type": "tool", "name": "look"},
        {"tool": {"name": "look"}},
        {"type": "any"},
        "any",
    ],
    ids=str,
)
def test_tool_is_chosen_as_others_write_it(make_llm: Make, scripted: Any, choice: Any) -> None:
    make_llm().chat(HELLO, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    assert asked(scripted).grammar.value["properties"]["name"] == {"const": "look"}


def test_length_is_the_rest_of_the_window_by_default(make_llm: Make, scripted: Any) -> None:
    llm = make_llm()
    assert llm.max_tokens is None
    assert llm.metadata.num_output == OpenAILike(model="m", api_key="none").metadata.num_output == -1
    llm.chat(HELLO)
    assert asked(scripted).max_tokens == 8192 - len(scripted.asked[-1].token_ids)


@pytest.mark.parametrize("name", ["api_base", "api_url", "base_url"])
def test_server_is_reached_as_the_caller_says(name: str) -> None:
    seen: list[httpx2.Request] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        return httpx2.Response(404)

    with httpx2.Client(transport=httpx2.MockTransport(answer)) as client:
        llm = BlendLLM(
            **{name: "http://server/v1"}, api_key="k", default_headers={"x-team": "a"}, http_client=client
        )
        with pytest.raises(Exception):  # noqa: B017  # there is no server
            llm.complete("Hello?")
    assert seen and {request.headers["x-team"] for request in seen} == {"a"}
    assert "http_client" not in llm.to_dict()


def test_headers_for_no_server_are_warned_about() -> None:
    with pytest.warns(BlendragWarning, match="ignored default_headers: without a base_url"):
        BlendLLM(default_headers={"x-team": "a"})


def test_model_without_calls_of_its_own_is_said_to_be_one(make_llm: Make) -> None:
    assert not make_llm(is_function_calling_model=False).metadata.is_function_calling_model


@pytest.mark.parametrize(
    ("wrong", "close"),
    [
        ({"modle": "x"}, "model"),
        ({"presence_penalti": 0.5}, "presence_penalty"),
        ({"max_token": 5}, "max_tokens"),
        ({"kv_cache_gb": 4}, "kv_cache_gib"),
    ],
)
def test_name_that_nobody_knows_is_warned_about_with_close_ones(
    make_llm: Make, wrong: dict[str, Any], close: str
) -> None:
    with pytest.warns(BlendragWarning, match=f"ignored '{next(iter(wrong))}'; did you mean .*{close}"):
        llm = make_llm(**wrong)
    if "modle" not in wrong:
        with pytest.warns(BlendragWarning, match=f"ignored '{next(iter(wrong))}'"):
            llm.chat(HELLO, **wrong)


def test_name_like_no_other_is_warned_about_too(make_llm: Make) -> None:
    with pytest.warns(BlendragWarning, match="ignored 'zzz'$"):
        llm = make_llm(zzz=1)
    with pytest.warns(BlendragWarning, match="ignored 'zzz'$"):
        llm.chat(HELLO, zzz=1)


def test_several_answers_are_warned_about(make_llm: Make) -> None:
    with pytest.warns(BlendragWarning, match="n=3: one answer is given"):
        make_llm(n=3).chat(HELLO)


def test_another_model_cannot_be_asked_for(make_llm: Make) -> None:
    with pytest.raises(ConfigError, match="make another one"):
        make_llm().chat(HELLO, model="gpt-4o")


def test_type_checkers_let_every_option_through() -> None:
    """Fields tell them that all are needed, and that there are no others."""
    nodes = ast.walk(ast.parse(inspect.getsource(BlendLLM)))
    (made,) = (one.args for one in nodes if isinstance(one, ast.FunctionDef) and one.name == "__init__")
    assert made.kwarg is not None and len(made.args) == 1
