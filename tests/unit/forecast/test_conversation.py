"""One conversation, one id; what is read of its prompts, in whatever script; and the rows made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.forecast import features as module
from blendrag.forecast.conversation import (
    PROMPTS,
    Window,
    conversation_id,
    shortened,
    window_of,
    without_documents,
)
from blendrag.forecast.features import features_of
from blendrag.models import DEFAULT_EMBEDDER
from word_embedder import WIDTH, WordEmbedder, WordTokenizer, features

SYSTEM = {"role": "system", "content": "Be brief."}
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.none() | st.text(max_size=4)}
    )
)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@given(MESSAGES)
def test_id_does_not_change_while_the_conversation_grows(later: list[dict[str, Any]]) -> None:
    opening = [SYSTEM, user("Where is it?")]
    assert conversation_id([*opening, *later]) == conversation_id(opening)
    assert conversation_id([*opening, *later], "mine") == conversation_id([], "mine")


def test_different_conversations_do_not_share_an_id() -> None:
    ids = [
        conversation_id([user("a")]),
        conversation_id([user("b")]),
        conversation_id([SYSTEM, user("a")]),
        conversation_id([user("a")], "1"),
        conversation_id([user("a")], "2"),
        conversation_id([], "a"),
        conversation_id([], "a", "acme"),
        conversation_id([], "a", "globex"),
        conversation_id([user("a")], None, "acme"),
    ]
    assert len(set(ids)) == len(ids)


def test_empty_history_has_no_id() -> None:
    assert conversation_id([]) is None
    assert conversation_id([SYSTEM, {"role": "assistant", "content": "hi"}, user(None), {}], "") is None
    assert window_of([SYSTEM]) == Window((), 0)


def test_parts_and_broken_text_are_read() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "image_url"}, "odd", {"text": 7}, {"text": "two"}]
    assert window_of([user(parts), user("\ud800")]) == Window(("one\ntwo", "\ud800"), 2)
    assert conversation_id([user(parts)]) == conversation_id([user("one\ntwo")])
    assert conversation_id([user("\ud800")])


def test_retrieved_documents_neither_change_the_id_nor_are_read_as_the_users_words() -> None:
    def asked(*documents: str) -> list[dict[str, Any]]:
        context = "\n\n".join(documents)
        return [
            {"role": "system", "content": f"Answer from these:\n\n{context}"},
            user("Where is it?"),
            {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}]},
            user([{"type": "text", "text": f"{context} And when?"}]),
        ]

    first = without_documents(asked("One text.", "One text. And more."), ["One text.", "One text. And more."])
    later = without_documents(asked("Another."), ["Another.", "not there", ""])
    assert conversation_id(first) == conversation_id(later) is not None
    assert conversation_id(asked("One text.")) != conversation_id(asked("Another."))
    assert window_of(first) == window_of(later) == Window(("Where is it?", "And when?"), 2)


@given(MESSAGES, st.lists(st.text(max_size=2)))
def test_leaving_documents_out_loses_no_turn(messages: list[dict[str, Any]], documents: list[str]) -> None:
    assert window_of(without_documents(messages, documents)).turns == window_of(messages).turns


class Counting(WordTokenizer):
    """Remembers how much it had to read."""

    characters = 0

    def __call__(self, text: str, **options: Any) -> Any:
        self.characters += len(text)
        return super().__call__(text, **options)


def tokens(text: str, tokenizer: Any) -> int:
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


@given(st.lists(st.integers(0, 99_999).map(str), max_size=400), st.integers(2, 100))
def test_share_of_tokens_is_not_exceeded_and_both_ends_stay(words: list[str], share: int) -> None:
    kept = shortened(" ".join(words), WordTokenizer(), share).split()
    if len(words) <= share:
        assert kept == words
        return
    half = share // 2
    assert kept == [*words[:half], "…", *words[-half:]]


@pytest.mark.parametrize(
    "text",
    [
        "word " * 3000,
        "超长的中文提示" * 3000,
        "ሰላም ልዑል " * 3000,
        "🙂" * 9000,
        "a" * 30_000,
        " " * 5000 + "x" * 5000,
        "\udc80" * 3000 + "\0" * 3000,
        "ﷺ" * 5000,
    ],
    ids=["words", "chinese", "amharic", "emoji", "unbroken", "blank", "broken", "ligature"],
)
def test_no_script_breaks_the_budget(text: str, tokenizer: Any) -> None:
    kept = shortened(text, tokenizer, 100)
    assert 0 < tokens(kept, tokenizer) <= 110  # words that were cut may become a few pieces more
    kept.encode()


def test_megabyte_is_not_read_through() -> None:
    tokenizer = Counting()
    kept = shortened("first " + "middle " * 200_000 + "last", tokenizer, 100)
    assert kept.startswith("first middle") and kept.endswith("middle last")
    assert tokenizer.characters < 10_000


def test_window_holds_the_latest_prompts_and_no_whole_books() -> None:
    window = Window.of([f"{number} " * 500_000 for number in range(9)])
    assert sum(map(len, window.prompts)) <= PROMPTS * 16_448
    assert all(prompt.startswith(f"{n} ") for n, prompt in enumerate(window.prompts, start=4))
    assert Window((" " * 100_000 + "hi" + " " * 100_000,), 1).prompts == ("hi",)


@given(st.text("a 超\u1220\ud800", min_size=1, max_size=80), st.integers(200, 30_000), st.integers(2, 512))
def test_what_a_window_leaves_out_would_not_have_been_read(piece: str, times: int, share: int) -> None:
    (kept,) = Window((piece * times,), 1).prompts
    assert shortened(kept, WordTokenizer(), share) == shortened(piece * times, WordTokenizer(), share)


def test_prompts_share_the_budget_equally() -> None:
    """The embedder's own limit is one of each text, and there is a text for each prompt."""
    made = features()
    made.rows([Window.of([f"{number} " * 1000 for number in range(PROMPTS)])])
    lengths = [len(text.split()) for text in made.embedder.texts]  # type: ignore[attr-defined]
    assert lengths == [(512 - 2) // PROMPTS + 1] * PROMPTS  # and the ellipsis


def test_only_the_latest_prompts_are_kept_but_all_are_counted() -> None:
    window = Window.of([str(number) for number in range(1000)])
    assert window == Window(("995", "996", "997", "998", "999"), 1000)
    assert Window.of([]) == Window((), 0)


# -- rows of features -----------------------------------------------------------------------------------

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
