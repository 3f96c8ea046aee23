"""The ways of an LLM of LlamaIndex's to an answer."""

from __future__ import annotations

from typing import Any

from llama_index.core.llms import ChatMessage

from llama_index.llms.blendrag import BlendLLM


async def every_way(llm: BlendLLM, prompt: str, **options: Any) -> dict[str, list[Any]]:
    """All responses of each method that generates."""
    messages = [ChatMessage(prompt)]
    return {
        "chat": [llm.chat(messages, **options)],
        "complete": [llm.complete(prompt, **options)],
        "stream_chat": list(llm.stream_chat(messages, **options)),
        "stream_complete": list(llm.stream_complete(prompt, **options)),
        "achat": [await llm.achat(messages, **options)],
        "acomplete": [await llm.acomplete(prompt, **options)],
        "astream_chat": [one async for one in await llm.astream_chat(messages, **options)],
        "astream_complete": [one async for one in await llm.astream_complete(prompt, **options)],
    }


def text_of(response: Any) -> str:
    return response.message.content if hasattr(response, "message") else response.text
