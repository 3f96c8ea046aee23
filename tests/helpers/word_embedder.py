"""An embedder of words, conversations with a rule that can be learned, and their forecasts."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import xxhash

from blendrag.forecast.background import ForecastCounts
from blendrag.forecast.conversation import Window
from blendrag.forecast.features import Features
from blendrag.forecast.log import Prompt, PromptLog

WIDTH = 24
WAIT_S = 30.0  # until a test gives up


class WordTokenizer:
    """A token per word, with offsets, as transformers' fast tokenizers give them."""

    def num_special_tokens_to_add(self) -> int:
        return 2

    def __call__(self, text: str, **options: Any) -> dict[str, list[tuple[int, int]]]:
        return {"offset_mapping": [match.span() for match in re.finditer(r"\S+", text)]}


class WordEmbedder:
    """The sum of random vectors of the words; remembers what it was asked for."""

    tokenizer, max_tokens = WordTokenizer(), 256

    def __init__(self, name: str = "words", width: int = WIDTH) -> None:
        self.name, self.width = name, width
        self.texts: list[str] = []

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        self.texts += texts
        return [self._vector(text).tolist() for text in texts]

    def _vector(self, text: str) -> np.ndarray[Any, Any]:
        total = np.zeros(self.width)
        for word in text.split():
            total += np.random.default_rng(xxhash.xxh3_64_intdigest(word.encode())).normal(size=self.width)
        return total / max(1.0, float(np.linalg.norm(total)))


def features(embedder: WordEmbedder | None = None) -> Features:
    return Features(embedder or WordEmbedder())  # type: ignore[arg-type]


def write_dialogs(path: Path, count: int = 120, last: str = "thanks bye") -> Path:
    """Conversations of 1 to 6 prompts; ``last`` is what most of them end with, and few others say."""
    random = np.random.default_rng(0)
    words = ["where", "when", "how", "much", "is", "the", "train", "hotel", "room", "ticket", "show"]
    with path.open("w") as file:
        for number in range(count):
            turns = []
            for _ in range(random.integers(1, 6)):
                said = " ".join(random.choice(words, size=random.integers(2, 9)))
                turns += [{"role": "user", "text": said}, {"role": "assistant", "text": "well"}]
            if random.random() < 0.9:
                turns.append({"role": "user", "text": last})
            file.write(json.dumps({"id": f"d{number}", "turns": turns}) + "\n")
    return path


def say(log: PromptLog, made: Features, *lines: tuple[str, float], prompt: str = "hi") -> None:
    """A prompt per line, of this conversation at this time."""
    window = Window((prompt,), 1)
    prompts = [Prompt(at, (), conversation, window) for conversation, at in lines]
    log.record("store", prompts, list(made.rows([window] * len(lines))), made.embedder.name)


class Counting(Protocol):
    @property
    def counts(self) -> ForecastCounts: ...


def settle(forecasts: Counting, asked: int) -> None:
    """Until every request is counted as something."""
    for _ in range(int(WAIT_S * 100)):
        counts = forecasts.counts
        if counts.answered + counts.dropped + counts.unanswered >= asked:
            return
        threading.Event().wait(0.01)
    pytest.fail(f"{forecasts.counts} of {asked}")
