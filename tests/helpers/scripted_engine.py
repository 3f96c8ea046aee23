"""A stand-in for an engine's generation: it says what it is told to, and notes what it is asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from blendrag.engine.client.generation import Delta, Sampling
from blendrag.engine.wire.recipe import Recipe
from blendrag.engine.wire.report import BlendReport
from engine_facts import FACTS


@dataclass
class Asked:
    """What the engine was asked to generate."""

    token_ids: tuple[int, ...]
    sampling: Sampling
    recipe: Recipe | None

    @property
    def spans(self) -> Sequence[tuple[str, int, int]]:
        """Which of the tokens are those of stored chunks: chunk key, start, length, in tokens."""
        return self.recipe.spans if self.recipe else ()


@dataclass
class Scripted:
    """Answers with ``answers`` in turn, the last one for ever; a token every ``pace_s`` seconds."""

    tokenizer: Any = None
    answers: list[str] = field(default_factory=lambda: ["The battery warranty lasts eight years."])
    pace_s: float = 0.0
    asked: list[Asked] = field(default_factory=list)
    given: int = 0

    facts = FACTS
    blends = alive = True
    max_model_len = 8192

    def prompts(self) -> list[str]:
        return [self.tokenizer.decode(asked.token_ids) for asked in self.asked]

    def stream(
        self, token_ids: Sequence[int], sampling: Sampling, recipe: Recipe | None = None, namespace: str = ""
    ) -> Generator[Delta]:
        for delta in self._deltas(token_ids, sampling, recipe):
            time.sleep(self.pace_s)
            yield delta

    async def astream(
        self, token_ids: Sequence[int], sampling: Sampling, recipe: Recipe | None = None, namespace: str = ""
    ) -> AsyncGenerator[Delta]:
        for delta in self._deltas(token_ids, sampling, recipe):
            await asyncio.sleep(self.pace_s)
            yield delta

    def _deltas(self, token_ids: Sequence[int], sampling: Sampling, recipe: Recipe | None) -> Iterator[Delta]:
        self.asked.append(Asked(tuple(token_ids), sampling, recipe))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        whole = self.tokenizer.encode(answer)
        ids = whole[: sampling.max_tokens]
        reason = "stop" if len(ids) == len(whole) else "length"
        cached = 0 if recipe is None else sum(length for _, _, length in recipe.spans)
        report = BlendReport(cached=cached, recomputed=cached // 10)
        for at, token in enumerate(ids, 1):
            self.given += 1
            last = {"finish_reason": reason, "report": report if recipe else None} if at == len(ids) else {}
            logprobs = [{token: -0.5, 1: -1.0}] if sampling.logprobs else []
            yield Delta(self.tokenizer.decode([token]), [token], 0.01, logprobs=logprobs, **last)
