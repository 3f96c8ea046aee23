"""``ChatBlend`` on the real engine: what LangChain's own tests do not ask."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import reduce
from operator import add
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate

from blendrag.errors import ConfigError, GenerationTimeoutError
from blendrag.lab.arms import reset
from langchain_blendrag import BlendChroma, ChatBlend
from stores import keys_of
from waiting import until
from workbench import real_texts

pytestmark = pytest.mark.engine

FOR_EVER = {"max_tokens": 3000, "ignore_eos": True}

PROMPT = ChatPromptTemplate.from_template(
    "Answer from these documents:\n\n{context}\n\nQuestion: {question}\nAnswer briefly."
)


@pytest.fixture(scope="module")
def documents(tokenizer: Any) -> list[Document]:
    texts = [tokenizer.decode(ids).strip() for ids in real_texts(tokenizer, tokens=160, per_package=1)]
    return [Document(text, id=f"d{number}") for number, text in enumerate(texts[:5])]


@pytest.fixture(scope="module")
def store(chat_blend: ChatBlend, documents: list[Document]) -> Iterator[BlendChroma]:
    kb = BlendChroma("chat", DeterministicFakeEmbedding(size=8), llm=chat_blend)
    kb.add_documents(documents)
    yield kb
    kb.delete_collection()


def ask(documents: list[Document], question: str = "What is this about?") -> list[Any]:
    context = "\n\n".join(document.page_content for document in documents)
    return PROMPT.invoke({"context": context, "question": question}).to_messages()


def test_every_document_is_reused_and_named_in_the_evidence(
    chat_blend: ChatBlend, store: BlendChroma, documents: list[Document]
) -> None:
    reset(chat_blend.chat.library.start())
    answer = chat_blend.invoke(ask(documents[:3]))
    tokens = sum(len(chat_blend.get_token_ids(document.page_content)) for document in documents[:3])
    evidence = answer.response_metadata["blendrag"]
    assert [row["source"] for row in evidence["documents"]] == ["d0", "d1", "d2"]
    assert sum(row["reused"] for row in evidence["documents"]) == tokens
    assert evidence["reused"] + evidence["recomputed"] == tokens
    details = answer.usage_metadata["input_token_details"]
    assert details["cache_read"] == evidence["reused"] > 0.8 * tokens
    assert details["blend_recomputed"] == evidence["recomputed"]
    assert evidence["plain"] is None and evidence["ttft_s"] > 0


def test_streamed_answer_is_the_whole_one(
    chat_blend: ChatBlend, store: BlendChroma, documents: list[Document]
) -> None:
    messages = ask(documents[:2])
    reset(chat_blend.chat.library.start())
    whole = chat_blend.invoke(messages)
    reset(chat_blend.chat.library.start())
    chunks = list(chat_blend.stream(messages))
    streamed = reduce(add, chunks)
    assert len(chunks) > 4, "token by token"
    assert streamed.content == whole.content
    assert streamed.usage_metadata == whole.usage_metadata
    assert streamed.response_metadata.keys() == whole.response_metadata.keys()


def test_chunk_that_is_damaged_is_counted_and_stored_again(
    chat_blend: ChatBlend, store: BlendChroma, documents: list[Document]
) -> None:
    library = chat_blend.chat.library
    texts = [document.page_content for document in documents[3:]]
    keys = [keys_of(library, [text]) for text in texts]
    (first,) = keys[0]
    library.session.open().delete([first])  # as if the file had been lost
    reset(chat_blend.chat.library.start())
    answer = chat_blend.invoke(ask(documents[3:], "Lost?"))
    created = answer.usage_metadata["input_token_details"]["cache_creation"]
    assert created == len(chat_blend.get_token_ids(texts[0]))
    assert answer.response_metadata["blendrag"]["missing"] == {first: "missing"}
    until(lambda: first in library.catalogue.ready([first]), said="it was not prefilled again")


def test_prompts_of_a_batch_are_answered_together(chat_blend: ChatBlend) -> None:
    """Requests that run together share engine steps: the first is not done before the last begins."""
    engine = chat_blend.chat.library.start()
    running, most = 0, 0

    async def watched(number: int) -> str:
        nonlocal running, most
        text = ""
        async for chunk in chat_blend.astream(f"Count to {number}.", max_tokens=16):
            if not text:
                running += 1
                most = max(most, running)
            text += str(chunk.content)
        running -= 1
        return text

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(watched(number) for number in range(4)))

    texts = asyncio.run(all_of_them())
    assert most == 4 and all(texts)
    batch = asyncio.run(chat_blend.abatch([f"Count to {number}." for number in range(4)], max_tokens=16))
    assert [answer.content for answer in batch] == texts
    assert engine.alive


def unfinished(llm: ChatBlend) -> bool:
    return llm.chat.library.start()._llm.output_processor.has_unfinished_requests()


@pytest.mark.parametrize("how", ["stream", "astream", "ainvoke"])
def test_answer_nobody_waits_for_is_stopped(chat_blend: ChatBlend, how: str) -> None:
    async def begin() -> None:
        if how == "ainvoke":
            task = asyncio.create_task(chat_blend.ainvoke("Go on for ever.", **FOR_EVER))
            await asyncio.sleep(1.0)
            assert unfinished(chat_blend)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            stream = chat_blend.astream("Go on for ever.", **FOR_EVER)
            await anext(stream)
            assert unfinished(chat_blend)
            await stream.aclose()

    if how == "stream":
        stream = chat_blend.stream("Go on for ever.", **FOR_EVER)
        next(stream)
        assert unfinished(chat_blend)
        stream.close()
    else:
        asyncio.run(begin())
    until(lambda: not unfinished(chat_blend), within_s=20, said="it goes on")


def test_answer_ends_when_its_time_is_up(chat_blend: ChatBlend) -> None:
    with pytest.raises(GenerationTimeoutError, match=r"0\.5 s"):
        chat_blend.invoke("Go on for ever.", **FOR_EVER, timeout=0.5)
    assert chat_blend.invoke("Hello.", max_tokens=2).content


def test_log_probabilities_are_those_of_the_answers_tokens(chat_blend: ChatBlend) -> None:
    answer = chat_blend.invoke("Say hello.", max_tokens=6, logprobs=True, top_logprobs=3)
    content = answer.response_metadata["logprobs"]["content"]
    assert "".join(one["token"] for one in content).startswith(str(answer.content))
    assert all(one["logprob"] <= 0 and len(one["top_logprobs"]) >= 3 for one in content)
    assert all(one["top_logprobs"][0]["logprob"] == one["logprob"] for one in content), "greedy"


def test_same_seed_gives_the_same_answer_and_another_another(chat_blend: ChatBlend) -> None:
    def say(seed: int) -> str:
        return str(chat_blend.invoke("Invent a name.", temperature=1.5, seed=seed, max_tokens=12).content)

    assert say(1) == say(1)
    assert len({say(seed) for seed in range(4)}) > 1


def test_documents_that_a_tool_attached_are_looked_for_first(
    chat_blend: ChatBlend, store: BlendChroma, documents: list[Document]
) -> None:
    call = {"name": "search", "args": {"query": "x"}, "id": "call_1", "type": "tool_call"}
    rows = chat_blend.explain(
        [
            HumanMessage("What do the documents say?"),
            AIMessage("", tool_calls=[call]),
            ToolMessage(
                f"Source: d0\nContent: {documents[0].page_content}",
                tool_call_id="call_1",
                artifact=[documents[0], Document("Never ingested, but given.", id="new")],
            ),
        ]
    )
    assert [row["source"] for row in rows if row["kind"] == "cached"] == ["d0"]
    assert [row["reason"] for row in rows if row["kind"] == "not found"] == [
        "not ingested, and not in the prompt"
    ]


def test_documents_that_are_given_are_reported_on(
    chat_blend: ChatBlend, store: BlendChroma, documents: list[Document]
) -> None:
    answer = chat_blend.bind(documents=[documents[0]], max_tokens=1).invoke("Nothing of it is here.")
    (row,) = answer.response_metadata["blendrag"]["documents"]
    assert row["kind"] == "not found" and row["reason"] == "its text is not in the prompt"


def test_another_model_is_refused(chat_blend: ChatBlend) -> None:
    with pytest.raises(ConfigError, match="answer as"):
        chat_blend.invoke("Hi.", model="another")


def test_refused_parameter_leaves_the_engine_alive(chat_blend: ChatBlend) -> None:
    with pytest.raises(ConfigError):
        chat_blend.invoke("Hi.", top_k=-7)
    with pytest.raises(ConfigError):
        chat_blend.invoke(
            "Hi.", response_format={"type": "json_schema", "json_schema": {"schema": {"type": 7}}}
        )
    assert chat_blend.invoke("Hi.", max_tokens=1).content
