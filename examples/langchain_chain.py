"""A LangChain retrieval chain. Only `llm` and `kb` know blendrag; the chain is the one of any tutorial."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_embeddings import MiniLM

from langchain_blendrag import BlendChroma, ChatBlend

PAGES = [
    Document(path.read_text(), metadata={"source": path.name})
    for path in sorted((Path(__file__).parent / "handbook").glob("*.md"))
]
PROMPT = ChatPromptTemplate.from_template(
    "Answer the question in one sentence, from the following pages of a handbook:\n\n{context}\n\n"
    "Question: {question}"
)


def format_docs(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def main(folder: str) -> None:
    # In a program of your own, take a folder that stays: the next run then has nothing to prefill.
    with ChatBlend(kv_dir=f"{folder}/kv", max_tokens=60) as llm:
        kb = BlendChroma("handbook", MiniLM(), persist_directory=folder, llm=llm)
        report = kb.ingest(PAGES, show_progress=False)
        print(f"{report.added} chunks stored, {report.tokens:,} tokens prefilled in {report.prefill_s:.1f} s")

        retriever = kb.as_retriever(search_kwargs={"k": 2})
        chain = {"context": retriever | format_docs, "question": RunnablePassthrough()} | PROMPT | llm
        for question in ("When is the office in Bergen closed?", "What is the limit of a company card?"):
            answer = chain.invoke(question)  # | StrOutputParser() would keep the text only
            print(f"\n{question}\n{answer.text}")

            evidence = answer.response_metadata["blendrag"]
            reused = [row for row in evidence["documents"] if row["kind"] == "cached"]
            print(
                f"[{len(reused)} documents reused: {evidence['reused']} tokens as they are, "
                f"{evidence['recomputed']} recomputed, {evidence['fresh']} read as usual; "
                f"first token after {evidence['ttft_s']:.2f} s]"
            )


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        main(folder)
