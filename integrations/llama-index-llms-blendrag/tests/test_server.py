"""``BlendLLM`` on a server, over real connections; the server is scripted."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import chromadb
import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.schema import TextNode

from blendrag.errors import BlendragWarning
from llama_index.llms.blendrag import BlendChromaVectorStore, BlendLLM
from scripted_server import EVIDENCE, MODEL, Reply, Script, events, scripted

HI = [ChatMessage("Hi")]


@pytest.fixture
def server() -> Iterator[Script]:
    with scripted() as script:
        yield script


def test_response_has_evidence_and_usage(server: Script) -> None:
    llm = BlendLLM(base_url=server.url, conversation="c1")
    server.replies = [events("It is", " blue.") for _ in range(2)]
    response: Any = llm.chat(HI)
    assert (response.message.content, response.raw["blendrag"]["reused"]) == (
        "It is blue.",
        EVIDENCE["reused"],
    )
    assert response.additional_kwargs["cache_creation_tokens"] == EVIDENCE["stored"]
    assert server.asked[-1][2]["blendrag"]["conversation"] == "c1"
    assert [one.delta for one in llm.stream_complete("Hi")][:2] == ["It is", " blue."]


def test_window_and_name_are_the_servers(server: Script) -> None:
    about = BlendLLM(base_url=server.url).metadata
    assert (about.context_window, about.model_name) == (MODEL["context_window"], "served")
    assert BlendLLM(base_url=server.url, context_window=64).metadata.context_window == 64


def test_collections_of_two_paths_are_told_apart(server: Script, tmp_path: Any) -> None:
    told = Reply(lines=['{"report": {"chunks": 1}}\n'])
    paths = set()
    for name in ("one", "two"):
        collection = chromadb.PersistentClient(str(tmp_path / name)).create_collection("same")
        store = BlendChromaVectorStore(chroma_collection=collection, llm=BlendLLM(base_url=server.url))
        server.replies = [told]
        store.add([TextNode(text="A sky.", id_="sky", embedding=[0.0, 1.0])])
        paths.add(server.asked[-1][1])
    assert len(paths) == 2


def test_key_is_hidden(server: Script) -> None:
    server.replies = [events("a"), events("a")]
    llm = BlendLLM(base_url=server.url, api_key="s3cret", default_headers={"x-gateway": "s3cret"})
    for one in (llm, pickle.loads(pickle.dumps(llm))):
        assert one.complete("Hi").text == "a"
    assert set(server.keys) == {"Bearer s3cret"}
    assert "s3cret" not in f"{llm!r} {llm.to_dict()} {llm.to_payload()} {llm.to_json()}"


def test_password_of_the_url_is_hidden() -> None:
    llm = BlendLLM(base_url="http://me:hidden@localhost:1/v1")
    assert "hidden" not in f"{llm!r} {llm} {llm.to_dict()} {llm.to_payload()} {llm.to_json()}"
    assert "base_url='http://localhost:1/v1'" in repr(llm)
    assert pickle.loads(pickle.dumps(llm)).base_url == llm.base_url


def test_option_that_nobody_knows_is_not_sent(server: Script) -> None:
    with pytest.warns(BlendragWarning, match="did you mean .*temperature"):
        llm = BlendLLM(base_url=server.url, temprature=1)
    with pytest.warns(BlendragWarning, match="did you mean .*repetition_penalty"):
        request = llm._call("Hi", {"repetition_penalti": 1.2}).request
    assert not request.sampling.other and not server.asked
