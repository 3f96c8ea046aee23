"""LangChain's own integration tests for chat models, on the packaged 135M model and the run's one engine."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_blendrag import ChatBlend
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from one_engine import ENGINE, kv_dir

pytestmark = pytest.mark.engine


class TestChatBlend(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatBlend

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**ENGINE, "kv_dir": kv_dir(), "min_cached_tokens": 16}

    @property
    def supports_model_override(self) -> bool:
        return False  # one engine, one model

    @property
    def supports_json_mode(self) -> bool:
        return True
