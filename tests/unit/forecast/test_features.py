"""Rows: whole, finite, and embedded once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from blendrag.errors import PredictorError
from blendrag.forecast.conversation import Window
from blendrag.forecast.features import SCALARS, Features, MemoryCache
from blendrag.forecast.words import open_embedder
from blendrag.lab.eviction.vectors import DiskCache
from blendrag.models import DEFAULT_EMBEDDER
from word_embedder import WIDTH, WordEmbedder, features

WINDOWS = [Window.of([f"prompt {each}" for each in range(count)]) for count in range(1, 200)]


class Interrupted(WordEmbedder):
    """Ctrl-C in the second batch."""

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        if self.texts:
            raise KeyboardInterrupt
        return super().embed(texts)


class Stumbling(WordEmbedder):
    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        return [[float("nan")] * WIDTH if "ሰላም" in text else row for text, row in
                zip(texts, super().embed(texts), strict=True)]  # fmt: skip


def test_interrupted_embedding_does_not_begin_again(tmp_path: Path) -> None:
    first = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        features(DiskCache(tmp_path, "words"), first).rows(WINDOWS)
    second = WordEmbedder()
    rows = features(DiskCache(tmp_path, "words"), second).rows(WINDOWS)
    assert first.texts and not set(first.texts) & set(second.texts)
    assert np.array_equal(rows, features().rows(WINDOWS))


def test_vectors_of_another_embedder_are_not_taken(tmp_path: Path) -> None:
    features(DiskCache(tmp_path, "words")).rows(WINDOWS[:3])
    other = WordEmbedder("others", width=7)
    assert features(DiskCache(tmp_path, "others"), other).rows(WINDOWS[:3]).shape[1] == 2 * 7 + 3


def test_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PredictorError, match="vectors"):
        DiskCache(tmp_path / "file", "words")


def test_identical_prompts_are_embedded_once() -> None:
    made = features()
    rows = made.rows([Window.of(["hello " * 400])] * 50_000)
    assert len(rows) == 50_000 and (rows == rows[0]).all()
    assert len(made.embedder.texts) == 1  # type: ignore[attr-defined]


def test_prompt_is_not_embedded_again_when_the_next_comes() -> None:
    made = features()
    long = ["one " * 300, "two " * 300, "three"]
    for count in (1, 2, 3):
        made.rows([Window.of(long[:count])])
    assert len(made.embedder.texts) == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("prompts", [[], [""], ["ሰላም"], ["hi", "ሰላም"], ["\ud800"], ["x" * 1_000_000] * 6])
def test_odd_histories_make_finite_rows(prompts: list[str]) -> None:
    made = features(embedder=Stumbling())
    rows = made.rows([Window.of(prompts)])
    assert rows.shape == (1, 2 * WIDTH + len(SCALARS))
    assert np.isfinite(rows).all()


def test_script_that_the_embedder_does_not_know_has_no_row() -> None:
    made = Features(open_embedder(DEFAULT_EMBEDDER))
    scripts = ["ሰላም ልዑል", "超长的中文", "🙂🙃", "\ud800\0", "ﷺ", "\u200b", "", "known words"]
    rows = made.rows([Window.of([script * 2000, script]) for script in scripts])
    assert np.isfinite(rows).all() and len(np.unique(rows[:3], axis=0)) > 1


def test_memory_cache_does_not_grow_for_ever() -> None:
    cache = MemoryCache(capacity=10)
    features(cache).rows(WINDOWS)
    assert len(cache._vectors) == 10
