"""What a client of a server does, in a program of its own that may import only what a client installs.

    python client_walk.py blendrag langchain_blendrag < names     these modules are refused, a name on a line

Prints, as JSON, what each call said that needs an extra. Of the helpers it takes only one that needs no
package, so that it runs where nothing is installed but what is tried, too.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from scripted_server import Reply, Script, events, scripted


def refuses(names: set[str], module: str) -> bool:
    parts = module.split(".")
    return any(".".join(parts[:length]) in names for length in range(1, len(parts) + 1))


class Without:
    """A finder of modules, without those of some names: to whoever imports them, they are not installed."""

    def __init__(self, finder: Any, names: set[str]) -> None:
        self._finder, self._names = finder, names

    def find_spec(self, name: str, *more: Any) -> Any:
        return None if refuses(self._names, name) else self._finder.find_spec(name, *more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


KEPT = Reply(lines=[json.dumps({"report": {"chunks": 1, "tokens": 8}}) + "\n"])
Calls = dict[str, Callable[[], Any]]


def blendrag(server: Script) -> Calls:
    """Ask a server, hold it to a schema, tell it of documents; return what needs more than a client has."""
    import blendrag
    from blendrag import BlendIndex, Chat, Document, RemoteChat, Settings, progress_bar
    from blendrag.cli import main
    from blendrag.embedder import Embedder
    from blendrag.index.loaders import load_sources

    for name in blendrag.__all__:
        getattr(blendrag, name)
    Document("A text.", "name")
    chat = RemoteChat(server.url, max_tokens=32)
    server.replies = [events("Yes."), events('{"a": 1}'), KEPT]
    assert chat.complete(chat.request("Hi")).text == "Yes."
    schema = {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": {"type": "integer"}}}}}
    assert chat.complete(chat.request("Hi", schema=schema)).text == '{"a": 1}'
    assert chat.collection("notes").add({"one": ["A text."]}).tokens == 8
    chat.close()
    with progress_bar():
        pass

    folder = Path(tempfile.mkdtemp())
    (folder / "page.html").write_text("<p>x")
    here = Chat(Settings.load(cache_dir=folder))
    return {
        "command": main,
        "engine": lambda: here.complete(here.request("Hi")),
        "collection": lambda: here.collection("notes"),
        "plan": lambda: here.explain(here.request("Hi")),
        "default model": lambda: here.context_window,
        "model of a hub": lambda: Chat(Settings.load(model="a/b", cache_dir=folder)).context_window,
        "index": lambda: BlendIndex.open(folder),
        "page": lambda: list(load_sources(folder / "page.html")),
        "embedder": lambda: Embedder("a/b").embed(["A text."]),
        "bar": lambda: progress_bar(True).__enter__(),
    }


def langchain_blendrag(server: Script) -> Calls:
    """Ask, stream, be asked natively, keep an in-memory store warm."""
    from langchain_core.embeddings import DeterministicFakeEmbedding
    from langchain_core.vectorstores import InMemoryVectorStore

    from langchain_blendrag import ChatBlend, SpeculativeRetriever, warm  # noqa: F401

    llm = ChatBlend(base_url=server.url)
    server.replies = [events("Yes."), events("Yes."), events("Yes."), KEPT]
    assert llm.invoke("Hi").text == "Yes."
    assert "".join(chunk.text for chunk in llm.stream("Hi")) == "Yes."
    assert asyncio.run(llm.ainvoke("Hi")).text == "Yes."
    store = warm(InMemoryVectorStore(DeterministicFakeEmbedding(size=8)), llm)
    store.add_texts(["A text."])
    assert server.asked[-1][0] == "PUT"

    def chroma() -> None:
        from langchain_blendrag import BlendChroma  # noqa: F401

    return {"chroma": chroma, "engine": lambda: ChatBlend().invoke("Hi")}


def llama_index(server: Script) -> Calls:
    """Complete, chat, keep nodes warm."""
    from llama_index.core.llms import ChatMessage
    from llama_index.core.schema import TextNode
    from llama_index.core.vector_stores import SimpleVectorStore

    from llama_index.llms.blendrag import BlendLLM, SpeculativeRerank, warm  # noqa: F401

    llm = BlendLLM(base_url=server.url)
    server.replies = [events("Yes."), events("Yes."), KEPT]
    assert llm.complete("Hi").text == "Yes."
    assert llm.chat([ChatMessage("Hi")]).message.content == "Yes."
    warm(SimpleVectorStore(), llm).add([TextNode(text="A text.", embedding=[1.0])])
    assert server.asked[-1][0] == "PUT"

    def chroma() -> None:
        from llama_index.llms.blendrag import BlendChromaVectorStore  # noqa: F401

    return {"chroma": chroma, "engine": lambda: BlendLLM().complete("Hi")}


def commands(server: Script) -> Calls:
    """Run the commands that an engine or a folder of documents is for, with no more than the command."""
    from typer.testing import CliRunner

    from blendrag.cli.app import app

    run, here = CliRunner(), tempfile.mkdtemp()
    assert run.invoke(app, ["serve", "--help"]).exit_code == 0
    lines = (
        "ask Who?", "ask Who? --server http://localhost:1", "bench ttft", "demo", "doctor", "fit", "gc",
        f"ingest {here}", "profile", "serve", "stats", "verify",
    )  # fmt: skip

    def ended(line: str) -> None:
        words = line.split()
        index = ["--index", here] if words[0] in ("ask", "gc", "ingest", "stats", "verify") else []
        sys.exit(run.invoke(app, words + index).stderr.strip())

    return {line: lambda line=line: ended(line) for line in lines}  # type: ignore[misc]


def said(call: Callable[[], Any]) -> str:
    from blendrag.errors import MissingDependencyError

    try:
        call()
    except MissingDependencyError as error:
        return str(error)
    except SystemExit as end:  # of the command
        return str(end.code)
    raise AssertionError("nothing is missing")


if __name__ == "__main__":
    refused = set(sys.stdin.read().split())
    before = set(sys.modules)
    sys.meta_path[:] = [Without(finder, refused) for finder in sys.meta_path]
    walks = {walk.__name__: walk for walk in (blendrag, langchain_blendrag, llama_index, commands)}
    with scripted() as script:
        script.always = lambda method, *_: KEPT if method == "DELETE" else None  # at the program's end
        found = {
            f"{name}: {what}": said(call)
            for name in sys.argv[1:]
            for what, call in walks[name](script).items()
        }
    loaded = [name for name in sys.modules.keys() - before if refuses(refused, name)]
    assert not loaded, loaded
    print(json.dumps(found, indent=1))
