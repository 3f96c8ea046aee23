"""The chat model of the run's one engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from langchain_blendrag import ChatBlend
from one_engine import ENGINE, kv_dir


@pytest.fixture(scope="session")
def chat_blend() -> Iterator[ChatBlend]:
    llm = ChatBlend(**{**ENGINE, "max_tokens": 32}, kv_dir=kv_dir(), min_cached_tokens=16)
    yield llm
    llm.close()
