"""A request per document, then one answer: LangChain's chains ``map_reduce`` and ``map_rerank``.

The structure is theirs (``load_qa_chain``), the wording ours. Documents are asked all at once, by plain
prefill: what these chains save is context, not computation.
"""

from __future__ import annotations

import asyncio
import re
import time

from blendrag.engine.client.engine import Engine
from blendrag.engine.client.generation import Sampling
from blendrag.lab.evaluate.asking import ArmPrompt
from blendrag.lab.evaluate.chunks import Documents, unstored
from blendrag.lab.prompts import PromptMaker
from blendrag.prompt import encode_document
from blendrag.settings import Settings
from blendrag.store.contexts import Ids

_QUOTE = (
    "The document may or may not help to answer the question. Quote word for word whatever in it does,"
    " and nothing else. If nothing does, say: nothing."
)
_SCORE = (
    "Answer the question from the document in a few words. Then, on a line of its own, say how completely the"
    " document answers it, from 0 (not at all) to 100 (completely), like this:\n<answer>\nScore: <0 to 100>"
)
_QUOTE_TOKENS = 64  # of each document's quotation
_SCORE_TOKENS = 8  # for the line with the score, behind the answer
_SCORED = re.compile(r"^(.*?)\s*score:\s*(\d{1,3})", re.IGNORECASE | re.DOTALL)


class MapArms:
    """answering: makes the prompts in which the final answer is asked for."""

    def __init__(self, engine: Engine, settings: Settings, answering: PromptMaker, max_tokens: int) -> None:
        self._engine, self._answering, self._max_tokens = engine, answering, max_tokens
        self._quoting = PromptMaker.of(engine, settings, _QUOTE)
        self._scoring = PromptMaker.of(engine, settings, _SCORE)

    async def map_reduce(self, documents: Documents, question: str) -> ArmPrompt:
        """The prompt over what was quoted from the documents."""
        begin = time.perf_counter()
        prompts = [_prompt(self._quoting, (ids,), question) for ids in documents]
        quotes = await self._ask_all("map_reduce", prompts, _QUOTE_TOKENS)
        found = [encode_document(self._answering.tokenizer, quote.strip()) for quote in quotes]
        prompt = _prompt(self._answering, tuple((ids,) for ids in found if ids), question)
        return ArmPrompt("map_reduce", prompt, spent_ms=1e3 * (time.perf_counter() - begin))

    async def map_rerank(self, documents: Documents, question: str) -> ArmPrompt:
        """The prompt over the document whose answer has the best score (of equal ones the first), and that
        answer: known when the last score is."""
        begin = time.perf_counter()
        prompts = [_prompt(self._scoring, (ids,), question) for ids in documents]
        texts = await self._ask_all("map_rerank", prompts, self._max_tokens + _SCORE_TOKENS)
        spent_ms = 1e3 * (time.perf_counter() - begin)
        answers = [scored(text) for text in texts]
        best = max(range(len(answers)), key=lambda number: answers[number][1])
        return ArmPrompt("map_rerank", prompts[best], spent_ms=spent_ms, answer=answers[best][0])

    async def _ask_all(self, arm: str, prompts: list[Ids], max_tokens: int) -> list[str]:
        sampling = Sampling(max_tokens=max_tokens)
        asked = (self._engine.agenerate(ids, sampling, None, arm) for ids in prompts)
        return [delta.text for delta in await asyncio.gather(*asked)]


def scored(text: str) -> tuple[str, int]:
    """An answer and its score; without a score in it, a text is an answer that scores 0."""
    match = _SCORED.match(text)
    return (match[1].strip(), min(100, int(match[2]))) if match else (text.strip(), 0)


def _prompt(maker: PromptMaker, documents: Documents, question: str) -> Ids:
    return maker.make_of(unstored(documents), question).token_ids
