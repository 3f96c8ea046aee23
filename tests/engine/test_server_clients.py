"""Clients of ``blendrag serve``: ours, of both frameworks, and others' as they are; and its end."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.messages import AIMessageChunk
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from blendrag import RemoteChat, errors
from blendrag.cli.app import app
from blendrag.models import DEFAULT_MODEL, resolve_model
from blendrag.settings import Settings
from langchain_blendrag import BlendChroma, ChatBlend
from llama_index.llms.blendrag import BlendLLM, warm
from places import ROOT
from served import COMPLETIONS, FILLER, KB, TEXTS, Server, text_of
from vector_stores import chroma

pytestmark = [pytest.mark.own_engine, pytest.mark.xdist_group("server")]

QUESTION = "When was Alpha2 founded?"
Client = Callable[[str], tuple[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}/v1"


@pytest.fixture
def chat(url: str) -> Iterator[RemoteChat]:
    made = RemoteChat(url, max_tokens=8)
    yield made
    made.close()


def prompt(question: str = QUESTION) -> str:
    return "\n\n".join([*TEXTS.values(), question])


def messages(question: str = QUESTION) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt(question)}]


def blended(evidence: dict[str, Any]) -> int:
    """Tokens that were taken from the store."""
    assert evidence["plain"] is None, evidence
    return evidence["reused"] + evidence["recomputed"]


# -- our own ----------------------------------------------------------------------------------------------


def test_evidence_is_what_the_server_says(server: Server, chat: RemoteChat) -> None:
    more = {"max_tokens": 8, "blendrag": {"evidence": True, "recompute_ratio": 0.4}}
    said = server.ask("Who founded Alpha1?", **more).json()
    answer = chat.complete(chat.request(messages("Who founded Alpha1?"), recompute_ratio=0.41))
    assert answer.text == said["choices"][0]["message"]["content"]
    evidence = answer.evidence
    parts = evidence.reused + evidence.recomputed + evidence.fresh + evidence.prefix
    assert parts == evidence.prompt == answer.usage.input == said["usage"]["prompt_tokens"]
    assert evidence.reused + evidence.recomputed == blended(said["blendrag"])
    assert [row["source"] for row in evidence.documents if row["kind"] == "cached"] == list(TEXTS)
    assert evidence.ms and evidence.tiers
    assert answer.ttft_s > 0 and answer.usage.output == said["usage"]["completion_tokens"]


async def test_stream_and_event_loop_give_the_same_answer(chat: RemoteChat) -> None:
    request = chat.request(messages())
    whole = chat.complete(request)
    streamed = "".join([piece.text async for piece in chat.astream(request)])
    together = await asyncio.gather(*(chat.acomplete(request) for _ in range(3)))
    assert {streamed, *(answer.text for answer in together)} == {whole.text}


def test_closed_stream_ends_and_the_next_question_is_answered(server: Server, chat: RemoteChat) -> None:
    stream = chat.stream(chat.request(messages(), max_tokens=1000))
    next(stream)
    stream.close()
    assert chat.complete(chat.request(messages())).text  # one engine: it would wait for the other's end


def test_plain_arm_blends_nothing(chat: RemoteChat) -> None:
    answer = chat.complete(chat.request(messages(), blend=False))
    assert answer.evidence.plain == "blending is switched off"


def test_prompts_are_counted_and_rendered_as_the_server_does(server: Server, chat: RemoteChat) -> None:
    request = chat.request(messages())
    assert chat.count_tokens(request) == chat.complete(request).usage.input
    assert chat.render(request).startswith("<|im_start|>") and QUESTION in chat.render(request)
    cached = [row for row in chat.explain(request) if row["kind"] == "cached"]
    assert [row["source"] for row in cached] == list(TEXTS)
    assert chat.count_tokens(chat.request("Hello there")) == len(chat.token_ids("Hello there"))
    assert (chat.context_window, chat.model_name) == (2048, DEFAULT_MODEL)


def test_tools_and_schemas_work_without_options_of_the_server(chat: RemoteChat) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    ask = [{"role": "user", "content": "Add 3 and 4."}]
    (call,) = chat.complete(chat.request(ask, tools=[tool], tool_choice="add", max_tokens=40)).tool_calls
    assert call.name == "add" and isinstance(call.arguments["a"], int)
    assert chat.complete(chat.request(ask, tools=[tool])).text
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    assert json.loads(chat.complete(chat.request(ask, schema=schema, max_tokens=32)).text)["colour"]


def test_log_probabilities_arrive(chat: RemoteChat) -> None:
    for prompted in (messages(), "Once upon a time, there was a"):
        answer = chat.complete(chat.request(prompted, logprobs=2, max_tokens=3, other={"ignore_eos": True}))
        assert len(answer.logprobs) == answer.usage.output == 3
        assert all(one.logprob == one.top[0][1] and len(one.top) == 2 for one in answer.logprobs)


def test_refusal_is_clear(url: str, chat: RemoteChat) -> None:
    with pytest.raises(errors.ConfigError, match="unknown selector 'qurey'"):
        chat.complete(chat.request(messages(), selector="qurey"))
    with pytest.raises(errors.PromptTooLongError, match="2048 tokens"):
        chat.complete(chat.request([{"role": "user", "content": "x " * 3000}]))
    with pytest.raises(errors.ConfigError, match=f"`other` does not exist.*{DEFAULT_MODEL}"):
        other = RemoteChat(url, model="other")
        other.complete(other.request(messages()))
    with pytest.raises(errors.ServerNotFoundError, match="blendrag serve"):
        RemoteChat(url.replace("/v1", "/nowhere")).collection("x").add({"a": ["A"]})


def test_collection_is_kept_as_embedded_ones_are(server: Server, chat: RemoteChat) -> None:
    kept = chat.collection("any / name: ä")
    village = f"Gamma is a village of nine houses. {TEXTS['city-0']}"
    report = kept.add({"village": [village], "city": [TEXTS["city-0"]]}, sources={"village": "file"})
    assert report.chunks == 1  # the city's is there
    assert kept.ids() == {"village", "city"}
    kept.remove(["village", "nobody"])
    assert kept.ids() == {"city"}
    synced = kept.sync({"village": [village]})
    assert (synced.added, synced.removed) == (1, 1)
    kept.clear()
    assert kept.ids() == set()
    assert server.client.get(KB).json()["ids"] == sorted(TEXTS)


# -- frameworks -------------------------------------------------------------------------------------------


class City(BaseModel):
    """A city."""

    name: str


def test_chain_has_what_embedded_ones_have(url: str) -> None:
    llm = ChatBlend(base_url=url, max_tokens=8)
    asked = prompt("Where does LangChain find that Alpha0 was founded?")
    message = llm.invoke(asked)
    facts = message.response_metadata["blendrag"]
    assert blended(facts) == sum(row["tokens"] for row in facts["documents"] if row["kind"] == "cached")
    assert message.response_metadata["model_name"] == DEFAULT_MODEL
    assert message.usage_metadata is not None
    details: Any = message.usage_metadata["input_token_details"]
    assert details["cache_read"] + details["blend_recomputed"] > 0
    chunks = list(llm.stream(asked))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert isinstance(whole, AIMessageChunk)
    assert whole.text == message.text and len(chunks) > 3
    assert whole.response_metadata["blendrag"]["prompt"] == facts["prompt"]
    assert asyncio.run(llm.ainvoke(asked)).text == message.text
    assert isinstance(llm.with_structured_output(City).invoke("Name a city.", max_tokens=64), City)
    assert llm.bind_tools([City], tool_choice="any").invoke("Name a city.", max_tokens=64).tool_calls
    assert llm.get_num_tokens("Hello there") == 2
    with pytest.raises(errors.ConfigError, match="cannot answer as 'gpt'"):
        llm.invoke("Hi", model="gpt")
    assert "s3cret" not in repr(ChatBlend(base_url=url, api_key="s3cret"))


def test_store_tells_the_server(url: str, server: Server, tmp_path: Path) -> None:
    llm = ChatBlend(base_url=url, max_tokens=4)
    store = BlendChroma(
        "villages", DeterministicFakeEmbedding(size=6), persist_directory=str(tmp_path), llm=llm
    )
    text = f"Delta is a village of nine houses. {FILLER}"
    store.ingest([Document(text, metadata={"source": "villages.txt"})], show_progress=False)
    (found,) = store.similarity_search("Delta?", k=1)
    answer = llm.invoke(f"{found.page_content}\n\nHow many houses?")
    assert blended(answer.response_metadata["blendrag"]) > 0
    assert store.sync(show_progress=False).unchanged == 1
    store.delete_collection()
    assert blended_of(llm, f"{found.page_content}\n\nHow many?") == 0


def blended_of(llm: ChatBlend, text: str) -> int:
    facts = llm.invoke(text).response_metadata["blendrag"]
    return facts["reused"] + facts["recomputed"]


def test_llama_index_has_what_embedded_ones_have(url: str) -> None:
    llm = BlendLLM(base_url=url, max_tokens=8)
    asked = prompt("Where does LlamaIndex find that Alpha0 was founded?")
    assert llm.metadata.context_window == 2048
    assert llm.metadata.model_name == DEFAULT_MODEL
    response = llm.chat([ChatMessage(asked)])
    raw: Any = response.raw
    assert blended(raw["blendrag"]) > 0
    *_, last = llm.stream_chat([ChatMessage(asked)])
    assert last.message.content == response.message.content
    assert last.raw["blendrag"]["prompt"] == raw["blendrag"]["prompt"]  # type: ignore[index]
    assert asyncio.run(llm.acomplete(asked)).text == response.message.content
    assert llm.structured_predict(City, _prompt("Name a city.")).name is not None
    with pytest.warns(errors.BlendragWarning, match="did you mean repetition_penalty"):
        llm.complete("Hi", repetition_penalti=1.0)
    text = f"Epsilon is a village of nine houses. {FILLER}"
    store = warm(SimpleVectorStore(), llm)
    store.add([TextNode(text=text, id_="epsilon", embedding=[0.1])])
    found = llm.complete(f"{text}\n\nHow many houses?").raw["blendrag"]  # type: ignore[index]
    assert blended(found) > 0
    store.delete_nodes(["epsilon"])


def _prompt(text: str) -> Any:
    from llama_index.core.prompts import PromptTemplate

    return PromptTemplate(text)


@pytest.mark.nightly
def test_code_that_is_shown_runs(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "serving.md").read_text()
    blocks = re.findall(r"^```py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    for block in blocks:
        exec(block.replace("http://localhost:8000", url.removesuffix("/v1")), {})
    assert len(blocks) == 3 and capsys.readouterr().out.count("\n") >= 4
    RemoteChat(url).collection("handbook").clear()


# -- commands ---------------------------------------------------------------------------------------------


def test_commands_reach_a_server(url: str, server: Server, tmp_path: Path) -> None:
    for number in range(3):
        name = f"Zeta{number}"
        (tmp_path / f"{name}.txt").write_text(
            f"{name} was founded in {1700 + number} by Eta{number}. {FILLER}"
        )
    index = str(tmp_path / "index")

    def run(*words: str, input: str | None = None) -> Any:
        return CliRunner(env={"BLENDRAG_MAX_TOKENS": "12"}).invoke(
            app, [*words, "--index", index], input=input
        )

    def ingest() -> Any:
        done = run("ingest", str(tmp_path), "--server", url, "--server", url, "--json")
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    assert (ingest()["added"], ingest()["unchanged"], ingest()["chunks"]) == (3, 3, 0)
    asked = run("ask", "Who founded Zeta1?", "--server", url, "--json", "-k", "2", "--ratio", "0.3")
    assert asked.exit_code == 0, asked.output
    answer = json.loads(asked.stdout)
    assert [source["source"].endswith("Zeta1.txt") for source in answer["sources"]].count(True) == 1
    assert blended(answer["evidence"]) > 200
    shown = run("ask", "Who founded Zeta1?", "--server", url, "--explain")
    assert shown.exit_code == 0 and "cached" in shown.stdout
    chatted = run("ask", "--server", url, "--similarity-top-k", "1", input="Who founded Zeta1?\nAnd when?\n")
    assert chatted.stdout.count("tokens reused") == 2, chatted.output
    (tmp_path / "Zeta0.txt").unlink()
    assert ingest()["removed"] == 1
    assert server.chunks()["ready"] == len(TEXTS) + 2
    refused = run("ask", "Who?", "--server", url, "--selector", "qurey")
    assert refused.exit_code == 1 and "unknown selector 'qurey'" in refused.stderr
    nobody = run("ask", "Who?", "--server", url.replace("/v1", "/nowhere"))
    assert nobody.exit_code == 1 and "blendrag serve" in nobody.stderr


def test_store_of_another_program_is_followed(
    url: str, server: Server, chat: RemoteChat, tmp_path: Path
) -> None:
    texts = {f"theta-{n}": f"Theta{n} was founded in {1600 + n} by Iota{n}. {FILLER}" for n in range(3)}

    def sync() -> Any:
        done = CliRunner().invoke(app, ["sync", str(store.url), "--server", url, "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    def ready() -> int:
        return int(server.chunks()["ready"])

    before = ready()
    with ExitStack() as stack:
        store = chroma(tmp_path / "chroma", stack)
        store.put(texts)
        assert (sync()["chunks"], sync()["chunks"], ready()) == (3, 0, before + 3)
        asked = "\n\n".join([*texts.values(), "Who founded Theta1?"])
        evidence = chat.complete(chat.request([{"role": "user", "content": asked}])).evidence
        assert evidence.reused + evidence.recomputed > 200
        store.delete(["theta-0"])
        store.put({"theta-1": f"Theta1 is gone. {FILLER}"})
        told = sync()
        assert (told["removed"], told["changed"], told["chunks"], ready()) == (1, 1, 1, before + 2)
        store.delete(["theta-1", "theta-2"])
        assert (sync()["removed"], ready()) == (2, before)


# -- four clients at once ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clients(url: str) -> dict[str, Client]:
    """By name; each gives the text, and the counts of the evidence where its library shows them."""
    extra = {"blendrag": {"documents": list(TEXTS.values())}}
    ours = ChatBlend(base_url=url, max_tokens=8)
    openai = ChatOpenAI(
        base_url=url, api_key="-", model=DEFAULT_MODEL, max_tokens=8, temperature=0, extra_body=extra,
        include_response_headers=True,
    )  # fmt: skip
    like = OpenAILike(
        api_base=url, api_key="-", model=DEFAULT_MODEL, max_tokens=8, temperature=0, is_chat_model=True
    )

    def by_ours(question: str) -> tuple[str, dict[str, Any]]:
        message = ours.invoke(prompt(question))
        return message.text, message.response_metadata["blendrag"]

    def by_openai(question: str) -> tuple[str, dict[str, Any]]:
        message = openai.invoke(prompt(question))
        return message.text, json.loads(message.response_metadata["headers"]["x-blendrag"])

    def by_like(question: str) -> tuple[str, dict[str, Any]]:
        response: Any = like.chat([ChatMessage(prompt(question))])
        return response.message.content, response.raw.model_extra["blendrag"]

    def by_curl(question: str) -> tuple[str, dict[str, Any]]:
        body = {"model": DEFAULT_MODEL, "messages": messages(question), "max_tokens": 8, "temperature": 0}
        command = ["curl", "-sS", "--fail-with-body", "-d", "@-", "-H", "content-type: application/json"]
        told = subprocess.run(
            [*command, f"{url}/chat/completions"],
            input=json.dumps(body),
            capture_output=True,
            text=True,
            check=True,
        )
        answer = json.loads(told.stdout)
        return answer["choices"][0]["message"]["content"], answer["blendrag"]

    return {"ours": by_ours, "ChatOpenAI": by_openai, "OpenAILike": by_like, "curl": by_curl}


def test_every_client_gets_the_same_answer(clients: dict[str, Client]) -> None:
    """One after the other: the later ones find the first one's KV in the prefix cache."""
    for number in range(3):
        texts = {name: ask(f"Who founded Alpha{number}, and when?")[0] for name, ask in clients.items()}
        assert len(set(texts.values())) == 1, texts


@pytest.mark.nightly
@pytest.mark.parametrize("count", [4, pytest.param(20, marks=pytest.mark.nightly(part="large"))])
def test_clients_at_once_all_reuse_what_is_stored(
    clients: dict[str, Client], chat: RemoteChat, count: int
) -> None:
    rows = chat.explain(chat.request(messages()))
    stored = sum(row["tokens"] for row in rows if row["kind"] == "cached")

    def ask(name: str, number: int) -> dict[str, Any]:
        return clients[name](f"What is city {number} of {name} called? ({number})")[1]

    work = [(name, number) for number in range(count) for name in clients]
    with ThreadPoolExecutor(len(clients)) as pool:
        told = list(pool.map(lambda one: ask(*one), work))
    assert len(told) == count * len(clients)
    assert {blended(evidence) for evidence in told} == {stored}


# -- the model --------------------------------------------------------------------------------------------


def test_served_model_has_its_adapter(server: Server, adapter: Path, tokenizer: Any) -> None:
    folder = resolve_model(DEFAULT_MODEL, Settings.load().cache_dir)
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    whole = text_of(server.ask(blendrag={"recompute_ratio": 1.0}))
    assert text_of(server.ask(blendrag={"blend": False})) == whole
    prompt = "Once upon a time, in a village of nine houses,"
    body = {"model": DEFAULT_MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 1}
    (choice,) = server.client.post(COMPLETIONS, json=body).json()["choices"]
    (served,) = choice["logprobs"]["token_logprobs"]

    def difference() -> float:
        ids = torch.tensor([tokenizer(prompt).input_ids])
        with torch.inference_mode():
            return abs(float(reference(ids).logits[0, -1].log_softmax(-1).max()) - served)

    assert difference() > 0.05, "the test sees an adapter that is left out"
    factors = load_file(adapter / "adapter_model.safetensors")
    for name in {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in factors}:
        a, b = (factors[f"base_model.model.{name}.lora_{each}.weight"] for each in "AB")
        reference.get_submodule(name).weight.data += 2 * (b @ a)  # lora_alpha / r
    assert difference() < 0.01


@pytest.mark.nightly
def test_server_that_ends_finishes_its_answer_and_leaves_no_process_and_forgets_nothing(
    server: Server,
) -> None:
    """The last test: it ends the server in the middle of an answer, and begins another one on its folder,
    which is killed."""
    body = {"model": DEFAULT_MODEL, "prompt": "Once upon a time", "max_tokens": 64, "stream": True}
    family = server.family()
    with server.client.stream("POST", COMPLETIONS, json=body | {"ignore_eos": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        assert "data: [DONE]" in list(lines), "it was cut"
    server.process.wait(60)
    assert psutil.wait_procs(family, timeout=10)[1] == []
    again = Server(server.folder, *server.more).wait()
    assert again.client.get(KB).json()["ids"] == sorted(TEXTS)
    assert again.ask().json()["blendrag"]["reused"] > 0
    assert again.end(signal.SIGKILL) == []
