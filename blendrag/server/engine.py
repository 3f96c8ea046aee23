"""The engine of the server that this process is."""

from __future__ import annotations

import asyncio
from typing import Any

from blendrag.engine.client.running import RunningEngine
from blendrag.engine.operations import EngineFacts
from blendrag.settings import Settings


class ServedEngine(RunningEngine):
    """vLLM's own ``AsyncLLM`` in the loop of its HTTP server, which ends it."""

    def __init__(
        self, settings: Settings, llm: Any, loop: asyncio.AbstractEventLoop, facts: EngineFacts
    ) -> None:
        super().__init__(settings)
        self._llm, self._loop, self.facts = llm, loop, facts

    @classmethod
    async def of(cls, settings: Settings, llm: Any) -> ServedEngine:
        """Bind the workers to their model. To be awaited in the server's loop."""
        (facts, *_) = await llm.collective_rpc("blendrag_bind")
        return cls(settings, llm, asyncio.get_running_loop(), EngineFacts(**facts))
