"""LangChain's response cache gives an answer again only to who asks for the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from langchain_community.cache import SQLiteCache
from langchain_core.caches import BaseCache, InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.rate_limiters import InMemoryRateLimiter
from pydantic import create_model

from langchain_blendrag import ChatBlend
from langchain_blendrag.chat_models import _HARMLESS

# Another value of every field: who adds a field says here what it is, or there that it changes no answer.
OTHERS: dict[str, Any] = {
    "api_key": "s3cret", "base_url": "http://me:hidden@localhost:1", "blend": False,
    "cache": False, "callbacks": [], "custom_get_token_ids": str.split,
    "default_headers": {"x-route": "s3cret"}, "default_query": {"key": "s3cret"}, "disable_streaming": True,
    "extra_body": {"min_p": 0.1}, "frequency_penalty": 0.5, "http_async_client": httpx2.AsyncClient(),
    "http_client": httpx2.Client(), "kv_dir": "elsewhere", "logit_bias": {1: 1.0}, "logprobs": True,
    "max_retries": 5, "max_tokens": 7, "metadata": {"a": "b"}, "min_p": 0.1, "model": "other/model",
    "model_kwargs": {"min_p": 0.2}, "more_settings": {"separator": "\n"}, "n": 2, "name": "ada",
    "output_version": "v1", "presence_penalty": 0.5, "profile": {}, "rate_limiter": InMemoryRateLimiter(),
    "reasoning_effort": "low", "recompute_ratio": 0.5, "repetition_penalty": 1.5, "quality": "fast",
    "kv_budget": "512:uniform", "min_cached_tokens": 9,
    "seed": 5, "selector": "hkvd", "stop": ["."], "streaming": True, "tags": ["a"], "temperature": 0.5,
    "timeout": 9.0, "top_k": 4, "top_logprobs": 2, "top_p": 0.5, "verbose": True,
}  # fmt: skip
PASSWORDS = ("s3cret", "hidden")


def key(llm: ChatBlend, **call: Any) -> str:
    return llm._get_llm_string(**call)


@pytest.mark.filterwarnings("ignore:ignored .* without a base_url")
@pytest.mark.parametrize("field", sorted(ChatBlend.model_fields))
def test_every_field_is_in_the_key_but_the_harmless_ones(field: str) -> None:
    other = ChatBlend(**{field: OTHERS[field]})
    assert (key(other) == key(ChatBlend())) == (field in _HARMLESS)
    assert not any(word in key(other) for word in PASSWORDS)


def test_settings_and_what_is_changed_later_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = ChatBlend()
    before = key(llm)
    assert key(ChatBlend()) == before == key(ChatBlend(blend=None))
    llm.temperature = 0.9
    assert key(llm) != before
    monkeypatch.setenv("BLENDRAG_SYSTEM_PROMPT", "Be brief.")
    assert key(ChatBlend()) != before
    servers = [ChatBlend(base_url=f"http://localhost:{port}", api_key=who) for port in (1, 2) for who in "ab"]
    assert len({key(one) for one in servers}) == 4


def test_options_of_the_call_are_in_the_key_but_whose_turn_it_is() -> None:
    llm = ChatBlend()
    calls: list[dict[str, Any]] = [
        {}, {"stop": ["a"]}, {"logprobs": True}, {"top_logprobs": 3}, {"blend": False}, {"n": 2},
        {"tools": [{"name": "a"}]}, {"response_format": {"type": "json_object"}},
        {"response_format": {"a": 1, "b": 2}}, {"response_format": {"b": 2, "a": 1}}, {"new": 1},
    ]  # fmt: skip
    calls += [{"response_format": create_model("Fee", a=kind)} for kind in (int, str)]
    assert len({key(llm, **call) for call in calls}) == len(calls)
    assert key(llm, conversation="ada", ls_structured_output_format={}, timeout=3.0) == key(llm)


@pytest.fixture(params=["memory", "SQLite"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BaseCache]:
    made = InMemoryCache() if request.param == "memory" else SQLiteCache(str(tmp_path / "cache.db"))
    set_llm_cache(made)
    yield made
    set_llm_cache(None)


@pytest.mark.usefixtures("cache")
def test_answer_from_the_cache_has_the_evidence_and_usage_of_the_first(
    make: Callable[..., ChatBlend], speaker: Any
) -> None:
    options: Any = {"logprobs": True, "top_logprobs": 2, "documents": ["Not in the prompt."]}
    first = make().invoke("Hello?", **options)
    again = make().invoke("Hello?", **options)
    assert len(speaker.asked) == 1
    assert again.response_metadata == first.response_metadata and again.response_metadata["logprobs"]
    assert again.response_metadata["blendrag"]["documents"]
    assert first.usage_metadata and again.usage_metadata
    assert again.usage_metadata.items() >= first.usage_metadata.items()
    assert (again.content, again.id) == (first.content, again.id)


@pytest.mark.usefixtures("cache")
def test_answer_of_the_same_configuration_only_is_given(make: Callable[..., ChatBlend], speaker: Any) -> None:
    speaker.answers = ["Red and blue and green."]
    for options in ({}, {"max_tokens": 2}, {"stop": ["blue"]}, {"top_logprobs": 1}, {"top_logprobs": 3}):
        answer = make(**options).invoke("Hello?")
        assert ("logprobs" in answer.response_metadata) == ("top_logprobs" in options)
    assert len(speaker.asked) == 5
