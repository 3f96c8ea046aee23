"""A LangChain agent that searches the handbook before it answers."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain.tools import ToolRuntime, tool
from langchain_core.documents import Document
from langchain_core.messages import ToolMessage
from langchain_embeddings import MiniLM

from langchain_blendrag import BlendChroma, ChatBlend

PAGES = [
    Document(path.read_text(), metadata={"source": path.name})
    for path in sorted((Path(__file__).parent / "handbook").glob("*.md"))
]


@wrap_model_call
def search_first(request, handler):
    """Force one search, then an answer: the packaged model has 135M parameters, too few to decide by itself.

    With a model that can decide, leave the middleware out.
    """
    searched = any(isinstance(message, ToolMessage) for message in request.messages)
    return handler(request.override(tool_choice="none" if searched else "search"))


def main(folder: str) -> None:
    with ChatBlend(kv_dir=f"{folder}/kv", max_tokens=60) as llm:
        kb = BlendChroma("handbook", MiniLM(), persist_directory=folder, llm=llm)
        kb.ingest(PAGES, show_progress=False)

        @tool(response_format="content_and_artifact")
        def search(runtime: ToolRuntime) -> tuple[str, list[Document]]:
            """Search the company's handbook for the user's question."""
            # A larger model writes a query of its own: search(query: str). This one repeats the schema.
            found = kb.similarity_search(runtime.state["messages"][0].text, k=2)
            return "\n\n".join(document.page_content for document in found), found

        agent = create_agent(llm, [search], middleware=[search_first])
        question = "What is the limit of a company card?"
        *_, found, answer = agent.invoke({"messages": [("user", question)]})["messages"]
        print(f"{question}\n{answer.text}")
        print("found in:", ", ".join(document.metadata["source"] for document in found.artifact))

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
