"""Rows: whole, finite, and embedded once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from blendrag.forecast import features as module
from blendrag.forecast.conversation import Window
from blendrag.forecast.features import features_of
from blendrag.models import DEFAULT_EMBEDDER
from word_embedder import WIDTH, WordEmbedder, features

WINDOWS = [Window.of([f"prompt {each}" for each in range(count)]) for count in range(1, 200)]


class Stumbling(WordEmbedder):
    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        return [[float("nan")] * WIDTH if "ሰላም" in text else row for text, row in
                zip(texts, super().embed(texts), strict=True)]  # fmt: skip


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
    made = features(Stumbling())
    rows = made.rows([Window.of(prompts)])
    assert rows.shape == (1, 2 * WIDTH + 1)
    assert np.isfinite(rows).all()


def test_script_that_the_embedder_does_not_know_has_a_row() -> None:
    made = features_of(DEFAULT_EMBEDDER)
    scripts = ["ሰላም ልዑል", "超长的中文", "🙂🙃", "\ud800\0", "ﷺ", "\u200b", "", "known words"]
    rows = made.rows([Window.of([script * 2000, script]) for script in scripts])
    assert np.isfinite(rows).all() and len(np.unique(rows[:3], axis=0)) > 1


def test_vectors_that_are_remembered_do_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REMEMBERED", 10)
    made = features()
    made.rows(WINDOWS)
    assert len(made._known) == 10
