"""``ChatBlend`` on a server, over real connections; the server is scripted."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore

from blendrag.errors import BrokenAnswerError, ConfigError
from langchain_blendrag import ChatBlend, warm
from scripted_server import EVIDENCE, Reply, Script, events, scripted


@pytest.fixture
def server() -> Iterator[Script]:
    with scripted() as script:
        yield script


def asked(server: Script, path: str = "/v1/chat/completions") -> list[Any]:
    return [body for _, asked, body in server.asked if asked == path]


def test_message_lacks_evidence_or_usage(server: Script) -> None:
    llm, counted = ChatBlend(base_url=server.url), UsageMetadataCallbackHandler()
    server.replies = [events("It is", " blue."), events("It is", " blue.")]
    message = llm.invoke("Hi", {"callbacks": [counted], "configurable": {"thread_id": "t1"}})
    facts = message.response_metadata["blendrag"]
    assert (message.text, facts["reused"]) == ("It is blue.", EVIDENCE["reused"])
    assert counted.usage_metadata["served"]["input_tokens"] == EVIDENCE["prompt"]
    assert [chunk.text for chunk in llm.stream("Hi")][:2] == ["It is", " blue."]
    assert asked(server)[0]["blendrag"]["conversation"] == "t1"


async def test_event_loop_gets_another_message(server: Script) -> None:
    server.replies = [events("It is", " blue.")]
    assert (await ChatBlend(base_url=server.url).ainvoke("Hi")).text == "It is blue."


def test_call_of_the_model_is_text(server: Script) -> None:
    def add(a: int) -> int:
        """Add."""
        return a

    server.replies = [events('{"name": "add", "arguments": {"a": 4}}')]
    bound = ChatBlend(base_url=server.url).bind_tools([add], tool_choice="any")
    (call,) = bound.invoke("Hi").tool_calls  # type: ignore[attr-defined]
    assert (call["name"], call["args"]) == ("add", {"a": 4})


def test_broken_answer_is_whole(server: Script) -> None:
    server.replies = [events("It is", done=False)]
    with pytest.raises(BrokenAnswerError):
        ChatBlend(base_url=server.url, max_retries=3).invoke("Hi")


def test_store_in_memory_is_not_kept_by_the_server(server: Script) -> None:
    told = '{"report": {"chunks": 1}}\n'
    server.replies = [Reply(lines=[told]), Reply(lines=["{}"]), Reply(lines=["{}"])]
    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=4))
    kept = warm(store, ChatBlend(base_url=server.url))
    kept.add_documents([Document("A sky.", id="sky")])
    (put,) = [body for method, _, body in server.asked if method == "PUT"]
    assert put["documents"] == {"sky": ["A sky."]}
    kept.delete(["sky"])
    assert next(path for method, path, _ in server.asked if method == "DELETE").endswith("id=sky")


def test_copy_has_another_server_or_none(server: Script) -> None:
    server.replies = [events("a") for _ in range(3)]
    llm = ChatBlend(base_url=server.url, api_key="s3cret")
    for one in (llm, pickle.loads(pickle.dumps(llm)), copy.deepcopy(llm)):
        assert one.invoke("Hi").text == "a"
    assert set(server.keys) == {"Bearer s3cret"}
    assert "s3cret" not in f"{llm!r} {llm.model_dump()} {llm._identifying_params}"


def test_password_of_the_url_is_shown() -> None:
    llm = ChatBlend(base_url="http://me:hidden@localhost:1/v1")
    shown = f"{llm!r} {llm} {llm.model_dump()} {llm.model_dump_json()} {llm.to_json()}"
    assert "hidden" not in f"{shown} {llm._identifying_params} {llm._get_ls_params()}"
    assert "base_url='http://localhost:1/v1'" in repr(llm)
    assert llm._identifying_params["base_url"] == "http://localhost:1/v1"


def test_setting_of_the_server_is_passed_over() -> None:
    with pytest.raises(ConfigError, match="kv_cache_gib is the server's"):
        ChatBlend(base_url="http://localhost:1", kv_cache_gib=4)
    with pytest.raises(ConfigError, match="kv_dir is the server's"):
        ChatBlend(base_url="http://localhost:1", kv_dir="kv")
    with pytest.raises(ConfigError, match="no URL"):
        ChatBlend(base_url="localhost:1")


def test_every_paragraph_is_a_request(server: Script, tmp_path: Any) -> None:
    told = '{"report": {"chunks": 2}}\n'
    server.replies = [Reply(lines=['{"pieces": [["One.", "Two."]]}']), Reply(lines=[told])]
    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=4))
    kept: Any = warm(store, ChatBlend(base_url=server.url, chunk_tokens=16))
    assert kept.ingest([Document("One.\n\nTwo.")], show_progress=False).added == 2
    _, path, body = server.asked[0]
    assert (path, body["chunk_tokens"]) == ("/v1/kb/split", 16)
