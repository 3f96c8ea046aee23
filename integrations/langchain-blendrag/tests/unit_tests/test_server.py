"""``ChatBlend`` on a server, over real connections; the server is scripted."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.exceptions import ContextOverflowError
from langchain_core.load import dumpd, dumps, load, loads
from langchain_core.messages import HumanMessage
from langchain_core.vectorstores import InMemoryVectorStore

from blendrag.errors import ConfigError, PromptTooLongError
from langchain_blendrag import ChatBlend, warm
from scripted_server import EVIDENCE, MODEL, Reply, Script, error, events, scripted


@pytest.fixture
def server() -> Iterator[Script]:
    with scripted() as script:
        yield script


def asked(server: Script, path: str = "/v1/chat/completions") -> list[Any]:
    return [body for _, asked, body in server.asked if asked == path]


def test_message_has_evidence_and_usage(server: Script) -> None:
    llm, counted = ChatBlend(base_url=server.url), UsageMetadataCallbackHandler()
    server.replies = [events("It is", " blue."), events("It is", " blue.")]
    message = llm.invoke("Hi", {"callbacks": [counted], "configurable": {"thread_id": "t1"}})
    facts = message.response_metadata["blendrag"]
    assert (message.text, facts["reused"]) == ("It is blue.", EVIDENCE["reused"])
    assert counted.usage_metadata["served"]["input_tokens"] == EVIDENCE["prompt"]
    assert [chunk.text for chunk in llm.stream("Hi")][:2] == ["It is", " blue."]
    assert asked(server)[0]["blendrag"]["conversation"] == "t1"


def test_store_in_memory_is_kept_by_the_server(server: Script) -> None:
    told = '{"report": {"chunks": 1}}\n'
    server.replies = [Reply(lines=[told]), Reply(lines=["{}"]), Reply(lines=["{}"])]
    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=4))
    kept = warm(store, ChatBlend(base_url=server.url))
    kept.add_documents([Document("A sky.", id="sky")])
    (put,) = [body for method, _, body in server.asked if method == "PUT"]
    assert put["documents"] == {"sky": ["A sky."]}
    kept.delete(["sky"])
    assert next(path for method, path, _ in server.asked if method == "DELETE").endswith("id=sky")


def test_copy_has_the_same_server_and_key(server: Script) -> None:
    server.replies = [events("a") for _ in range(3)]
    llm = ChatBlend(base_url=server.url, api_key="s3cret")
    for one in (llm, pickle.loads(pickle.dumps(llm)), copy.deepcopy(llm)):
        assert one.invoke("Hi").text == "a"
    assert set(server.keys) == {"Bearer s3cret"}
    assert "s3cret" not in f"{llm!r} {llm.model_dump()} {llm._identifying_params}"


def test_saved_model_is_made_again_without_what_is_secret(server: Script, monkeypatch: Any) -> None:
    monkeypatch.setenv("BLENDRAG__API_KEY", "s3cret")
    llm = ChatBlend(
        base_url=server.url.replace("://", "://me:hidden@"),
        api_key="s3cret",
        default_headers={"x-team": "h1dden"},
        stop=["."],
        model_kwargs={"min_p": 0.1},
    )
    written = dumps(llm)
    assert not any(secret in written for secret in ("hidden", "h1dden", "s3cret"))
    allowed = {"allowed_objects": [ChatBlend], "valid_namespaces": ["langchain_blendrag"]}
    loaded = loads(written, secrets_from_env=True, **allowed)
    assert (loaded.stop, loaded.model_kwargs) == (llm.stop, llm.model_kwargs)
    assert dumps(loaded) == written
    server.replies = [events("a")]
    assert loaded.invoke("Hi").text == "a"
    assert set(server.keys) == {"Bearer s3cret"}


def test_saved_engine_is_made_again(tmp_path: Path) -> None:
    llm = ChatBlend(kv_dir=tmp_path, temperature=0.5, kv_cache_gib=2, quality="close")
    loaded = load(dumpd(llm), allowed_objects=[ChatBlend], valid_namespaces=["langchain_blendrag"])
    assert loaded.dict() == llm.dict() and loaded.settings == llm.settings


def test_traces_name_the_model_of_the_server_once_it_is_known(server: Script) -> None:
    llm = ChatBlend(base_url=server.url)
    assert llm._get_ls_params()["ls_model_name"] == server.url
    assert llm.chat.context_window == MODEL["context_window"]
    assert llm._get_ls_params()["ls_model_name"] == MODEL["name"]


def test_password_of_the_url_is_hidden() -> None:
    llm = ChatBlend(base_url="http://me:hidden@localhost:1/v1")
    shown = f"{llm!r} {llm} {llm.model_dump()} {llm.model_dump_json()} {llm.to_json()}"
    assert "hidden" not in f"{shown} {llm._identifying_params} {llm._get_ls_params()}"
    assert "base_url='http://localhost:1/v1'" in repr(llm)
    assert llm._identifying_params["base_url"] == "http://localhost:1/v1"


def test_prompt_too_long_for_the_server_is_langchains_error_and_ours(server: Script) -> None:
    said = "This model's maximum context length is 512 tokens. However, you requested 900 tokens."
    in_stream = Reply(
        lines=[f"data: {json.dumps({'error': {'message': said, 'code': 400}})}\n\n"],
        headers={"content-type": "text/event-stream", "x-blendrag": "{}"},
    )
    llm = ChatBlend(base_url=server.url)
    for reply in (error(400, said), in_stream):
        server.replies = [reply]
        with pytest.raises(ContextOverflowError, match="maximum context length") as raised:
            llm.invoke("Hi")
        assert isinstance(raised.value, PromptTooLongError)
    server.replies = [error(400, said)]
    with pytest.raises(ContextOverflowError):
        llm.get_num_tokens_from_messages([HumanMessage("Hi")])


def test_server_is_asked_once_for_several_answers(server: Script) -> None:
    server.replies = [events("It is", " blue.") for _ in range(1 + 3)]
    llm = ChatBlend(base_url=server.url, n=3)
    (generations,) = llm.generate([[HumanMessage("Hi")]]).generations
    assert [one.text for one in generations] == ["It is blue."] * 3 and len(asked(server)) == 1
    (generations,) = llm.generate([[HumanMessage("Hi")]], temperature=0.5).generations
    assert [one.text for one in generations] == ["It is blue."] * 3
    message: Any = generations[0].message
    assert (message.usage_metadata["input_tokens"], message.usage_metadata["output_tokens"]) == (9, 6)


def test_headers_and_query_reach_the_server_and_are_shown_nowhere(server: Script) -> None:
    seen: list[httpx2.Request] = []
    client = httpx2.Client(event_hooks={"request": [seen.append]})
    given: Any = {"default_headers": {"x-team": "s3cret"}, "default_query": {"code": "s3cret"}}
    llm = ChatBlend(base_url=server.url, http_client=client, **given)
    server.replies = [events("a")]
    assert llm.invoke("Hi").text == "a"
    assert {request.headers["x-team"] for request in seen} == {"s3cret"}
    assert {request.url.params["code"] for request in seen} == {"s3cret"}
    shown = f"{llm!r} {llm.model_dump()} {llm.model_dump_json()} {llm.to_json()} {llm._identifying_params}"
    assert "s3cret" not in shown + llm._get_llm_string()
    client.close()


def test_setting_of_the_server_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_gib is the server's"):
        ChatBlend(base_url="http://localhost:1", kv_cache_gib=4)
    with pytest.raises(ConfigError, match="kv_dir is the server's"):
        ChatBlend(base_url="http://localhost:1", kv_dir="kv")
    with pytest.raises(ConfigError, match="no URL"):
        ChatBlend(base_url="localhost:1")


def test_paragraphs_are_split_by_one_request(server: Script, tmp_path: Any) -> None:
    told = '{"report": {"chunks": 2}}\n'
    server.replies = [Reply(lines=['{"pieces": [["One.", "Two."]]}']), Reply(lines=[told])]
    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=4))
    kept: Any = warm(store, ChatBlend(base_url=server.url, chunk_tokens=16))
    assert kept.ingest([Document("One.\n\nTwo.")], show_progress=False).added == 2
    _, path, body = server.asked[0]
    assert (path, body["chunk_tokens"]) == ("/v1/kb/split", 16)
