"""A process that only makes objects, or is a server's client, stays small."""

from __future__ import annotations

import subprocess
import sys

from scripted_server import Reply, events, scripted

CLIENT = """
import sys
import blendrag
from langchain_blendrag import BlendChroma, ChatBlend
from llama_index.llms.blendrag import BlendChromaVectorStore, BlendLLM, warm

ChatBlend()
llm = BlendLLM(context_window=4096)
assert llm.metadata.context_window == 4096 and llm.to_payload() and llm.to_dict()
url = sys.argv[1]
chat = blendrag.RemoteChat(url)
chat.collection("documents").add({"sky": ["The sky is blue."]})
request = chat.request([{"role": "user", "content": "Hi"}], chat_template_kwargs={"enable_thinking": False})
texts = [chat.complete(request).text]
texts.append(ChatBlend(base_url=url).invoke("Hi").text)
texts.append(BlendLLM(base_url=url).complete("Hi").text)
heavy = {"torch", "transformers", "vllm", "safetensors", "sentence_transformers"}
print(texts, sorted(heavy & sys.modules.keys()))
"""


def test_client_imports_nothing_that_computes() -> None:
    with scripted() as server:
        server.replies = [Reply(lines=['{"report": {}}']), *(events("Hello") for _ in range(3))]
        done = subprocess.run([sys.executable, "-c", CLIENT, server.url], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["['Hello', 'Hello', 'Hello'] []"], done.stderr[-2000:]
