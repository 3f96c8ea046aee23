"""The time saved by swapping the model class in a LangChain chain and in a LlamaIndex query engine.

    python integrations/swap.py --squad dev-v1.1.json.gz        paragraphs and questions of a SQuAD file
    python integrations/swap.py                                 descriptions of installed packages

The last columns say how many answers begin with the same word, are the same, and share words (F1).
Both frameworks get the same chunks and questions. Every question is asked twice on the same engine, with
``blend=False`` (stock vLLM, prefix caching included) and with ``blend=True``; which comes first alternates.
The first question warms up, and is not counted.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).parents[1] / "examples"))  # its embeddings

SETTINGS = {"min_cached_tokens": 64, "max_tokens": 48}
TEMPLATE = "Answer the question based only on the following context:\n{context}\n\nQuestion: {question}\n"
HEAD = """\
| | TTFT before, ms (p10-p90) | after | speed-up | tokens from the store | first word | answer | F1 |
|---|---:|---:|---:|---:|---:|---:|---:|"""


@dataclass(frozen=True, slots=True)
class Reply:
    text: str
    ttft_s: float
    evidence: dict[str, Any]


Ask = Callable[[str, bool], Reply]


def squad(path: Path, chunks: int, questions: int) -> tuple[list[str], list[str]]:
    """Return paragraphs, taking articles in turn, and a question on every n-th of them."""
    from blendrag.lab.records import read_records

    articles = [article["paragraphs"] for _, article in read_records(path)]
    paragraphs = [one for each in zip_longest(*articles) for one in each if one is not None][:chunks]
    step = max(1, len(paragraphs) // questions)
    asked = [paragraph["qas"][0]["question"] for paragraph in paragraphs[::step]]
    return [paragraph["context"] for paragraph in paragraphs], asked[:questions]


def packages(chunks: int, questions: int) -> tuple[list[str], list[str]]:
    """Return parts of descriptions of installed packages, and what each of the first packages is for."""
    from blendrag.lab.texts import description, package_names

    texts: list[str] = []
    asked: list[str] = []
    for name in package_names():
        parts = re.findall(r"(?s)\S.{400,900}?(?:\.|\n)\s", description(name))[:4]
        texts += parts
        asked += [f"What is {name} for?"] if parts else []
    return texts[:chunks], asked[:questions]


def langchain(texts: list[str], folder: Path, top_k: int) -> tuple[Ask, Callable[[], None]]:
    from langchain_core.documents import Document
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_core.runnables import RunnablePassthrough
    from langchain_embeddings import MiniLM

    from langchain_blendrag import BlendChroma, ChatBlend

    llm = ChatBlend(kv_dir=folder / "kv", **SETTINGS)
    kb = BlendChroma("swap", MiniLM(), persist_directory=str(folder / "db"), llm=llm)
    kb.add_documents([Document(text) for text in texts])

    def join(documents: list[Document]) -> str:
        return "\n\n".join(document.page_content for document in documents)

    def ask(question: str, blend: bool) -> Reply:
        chain: Any = (
            {"context": kb.as_retriever(search_kwargs={"k": top_k}) | join, "question": RunnablePassthrough()}
            | ChatPromptTemplate.from_template(TEMPLATE)
            | llm.bind(blend=blend)
        )
        message = chain.invoke(question)
        evidence = message.response_metadata["blendrag"]
        return Reply(message.text, evidence["ttft_s"], evidence)

    return ask, llm.close


def llama_index(texts: list[str], folder: Path, top_k: int) -> tuple[Ask, Callable[[], None]]:
    import chromadb
    from llama_index.core import StorageContext, VectorStoreIndex
    from llama_index.core.instrumentation import get_dispatcher
    from llama_index.core.instrumentation.event_handlers import BaseEventHandler
    from llama_index.core.schema import TextNode
    from llamaindex_embeddings import MiniLM

    from llama_index.llms.blendrag import BlendChromaVectorStore, BlendLLM
    from llama_index.llms.blendrag.events import BlendCacheEvent

    seen: list[dict[str, Any]] = []

    class Watch(BaseEventHandler):
        def handle(self, event: Any, **_: Any) -> None:
            if isinstance(event, BlendCacheEvent):
                seen.append(dict(event.evidence))

    get_dispatcher().add_event_handler(Watch())
    llm = BlendLLM(kv_dir=folder / "kv", **SETTINGS)
    collection = chromadb.PersistentClient(str(folder / "db")).get_or_create_collection("swap")
    store = BlendChromaVectorStore(chroma_collection=collection, llm=llm)
    index = VectorStoreIndex(
        [TextNode(text=text) for text in texts],
        storage_context=StorageContext.from_defaults(vector_store=store),
        embed_model=MiniLM(),
    )

    def ask(question: str, blend: bool) -> Reply:
        llm.blend = blend
        engine = index.as_query_engine(llm=llm, similarity_top_k=top_k)
        seen.clear()
        text = str(engine.query(question))
        return Reply(text, seen[0]["ttft_s"], seen[0])

    return ask, llm.close


def compare(ask: Ask, questions: list[str]) -> list[tuple[Reply, Reply]]:
    from blendrag.lab.experiment import in_turn
    from blendrag.progress import SILENT

    replies: dict[str, list[Reply]] = {"off": [], "blend": []}
    for turn in in_turn({"off": False, "blend": True}, questions, SILENT):
        reply = ask(turn.trial, turn.arm)
        if not turn.warms_up:
            replies[turn.key].append(reply)
    return list(zip(*replies.values(), strict=True))


def row(name: str, pairs: list[tuple[Reply, Reply]]) -> str:
    from blendrag.lab.evaluate.summary import f1
    from blendrag.lab.statistics import spread

    def ms(values: list[float]) -> str:
        median, deciles = spread(1e3 * value for value in values).shown()
        return f"{median} ({deciles})"

    ratio, deciles = spread(off.ttft_s / on.ttft_s for off, on in pairs).shown(".1f")
    prompt = statistics.mean(on.evidence["prompt"] for _, on in pairs)
    kept = statistics.mean(on.evidence["reused"] + on.evidence["recomputed"] for _, on in pairs)
    same = sum(off.text == on.text for off, on in pairs)
    first = sum(off.text.split()[:1] == on.text.split()[:1] for off, on in pairs)
    agreement = statistics.mean(f1(on.text, [off.text]) for off, on in pairs)
    return (
        f"| {name} | {ms([off.ttft_s for off, _ in pairs])} | {ms([on.ttft_s for _, on in pairs])} |"
        f" {ratio}x ({deciles}) |"
        f" {kept:,.0f} of {prompt:,.0f} |"
        f" {first} of {len(pairs)} | {same} of {len(pairs)} | {agreement:.2f} |"
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--squad", type=Path, help="a SQuAD v1.1 file, may be gzipped")
    options.add_argument("--chunks", type=int, default=240)
    options.add_argument("--questions", type=int, default=20)
    options.add_argument("--top-k", type=int, default=10)
    options.add_argument("--answers", action="store_true", help="print every pair of answers")
    given = options.parse_args()
    texts, questions = (
        squad(given.squad, given.chunks, given.questions)
        if given.squad
        else packages(given.chunks, given.questions)
    )
    print(f"{len(texts)} chunks, {len(questions)} questions, {given.top_k} chunks a question\n")
    rows = []
    for name, make in (("LangChain chain", langchain), ("LlamaIndex query engine", llama_index)):
        with tempfile.TemporaryDirectory() as folder:
            ask, close = make(texts, Path(folder), given.top_k)
            pairs = compare(ask, questions)
            close()
        rows.append(row(name, pairs))
        for off, on in pairs if given.answers else ():
            print(f"off:   {off.text!r}\nblend: {on.text!r}\n")
    print(HEAD)
    print("\n".join(rows))


if __name__ == "__main__":
    main()
