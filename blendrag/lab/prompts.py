"""The prompts that are measured: random chunks in a random order, behind a system text, before a question."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from blendrag.engine.client.engine import Engine
from blendrag.errors import PromptTooLongError
from blendrag.models import load_tokenizer
from blendrag.prompt import encode_document, turn_of
from blendrag.prompt.template import Part, encode_markup, implied_bos, render_parts
from blendrag.settings import Settings
from blendrag.store.contexts import Chunk

QUESTIONS = (
    "What is the first text about?",
    "Which of the texts is about software, and what is it for?",
    "What do the texts have in common?",
    "Name one thing that the last text asks of its reader.",
    "Which text would you read first, and why?",
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's token ids, and (key, start, length) of every chunk in them."""

    token_ids: tuple[int, ...]
    spans: tuple[tuple[str, int, int], ...]

    def chunk_tokens(self, begin: int = 0) -> int:
        """Return how many tokens of chunks are at position ``begin`` and after it."""
        return sum(max(0, start + length - max(start, begin)) for _, start, length in self.spans)


@dataclass(frozen=True, slots=True)
class Trial:
    """A prompt for every arm. before: what prefix caching is asked first, in another order."""

    prompt: Prompt
    before: Prompt


class PromptMaker:
    """A maker of prompts for one tokenizer, in the model's chat template if it has one."""

    def __init__(self, tokenizer: Any, *, system_prompt: str, separator: str) -> None:
        self.tokenizer, self._system = tokenizer, system_prompt
        self._separator_text, self._separator = separator, encode_document(tokenizer, separator)

    @classmethod
    def of(cls, engine: Engine, settings: Settings) -> PromptMaker:
        """Make one for the engine's model."""
        tokenizer = load_tokenizer(engine.model_path)
        return cls(tokenizer, system_prompt=settings.system_prompt, separator=settings.separator)

    def make(self, chunks: Sequence[Chunk], question: str) -> Prompt:
        """Make a prompt of chunks, each of which is a document."""
        return self.make_of([[chunk] for chunk in chunks], question)

    def make_of(self, documents: Sequence[Sequence[Chunk]], question: str) -> Prompt:
        """Make a prompt of documents, each of chunks right behind each other and the separator."""
        ids: list[int] = []
        spans: list[tuple[str, int, int]] = []
        parts, last = self._parts(question)
        for part in parts:
            if part.message is None:
                ids += encode_markup(self.tokenizer, part.text)
                continue
            before = ""  # the documents: the system prompt, where the template knows no such role
            if part.message == last:
                before, _, _ = part.text.rpartition(question)
                ids += encode_document(self.tokenizer, before)
                for document in documents:
                    for chunk in document:
                        spans.append((chunk.key, len(ids), len(chunk.token_ids)))
                        ids += chunk.token_ids
                    ids += self._separator
            ids += encode_document(self.tokenizer, part.text[len(before) :])
        return Prompt(tuple(ids), tuple(spans))

    def _parts(self, question: str) -> tuple[list[Part], int]:
        """Return the parts of a prompt, and the number of the message with the question; documents go before
        that."""
        if getattr(self.tokenizer, "chat_template", None):
            turn = turn_of(self.tokenizer, self._system, question, self._separator_text)
            return render_parts(self.tokenizer, turn), len(turn) - 1
        before = f"{implied_bos(self.tokenizer) or ''}{self._system}{self._separator_text}"  # a base model
        return [Part(before), Part(question, 0), Part(self._separator_text)], 0

    def trials(self, pool: Sequence[Chunk], chunks: int, count: int, seed: int | str) -> list[Trial]:
        """Make ``count`` trials, each of two or more random chunks of ``pool`` in two random orders; the same
        ones for the same ``seed``."""
        rng, made = random.Random(seed), []
        for question in islice(cycle(QUESTIONS), count):
            chosen = rng.sample(pool, chunks)
            other = list(chosen)
            while other == chosen:
                rng.shuffle(other)
            made.append(Trial(self.make(chosen, question), self.make(other, question)))
        return made


def check_prompts(prompts: Iterable[Prompt], window: int, answer: int = 1) -> None:
    """Raise PromptTooLongError unless every prompt and ``answer`` tokens fit into the model's window."""
    longest = max(len(prompt.token_ids) for prompt in prompts)
    if longest + answer > window:
        raise PromptTooLongError(
            f"the prompts have up to {longest} tokens, the model's window {window}:"
            " ask for fewer or smaller chunks, or use a model with a longer window"
        )
