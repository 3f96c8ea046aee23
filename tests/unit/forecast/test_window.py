"""What is read of prompts, however long and in whatever script."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendrag.forecast.window import PROMPTS, Window, shortened
from word_embedder import WordTokenizer, features


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


def test_queue_of_windows_holds_whole_books() -> None:
    window = Window.of([f"{number} " * 500_000 for number in range(9)])
    assert sum(map(len, window.prompts)) <= PROMPTS * 16_448
    assert all(prompt.startswith(f"{n} ") for n, prompt in enumerate(window.prompts, start=4))
    assert Window((" " * 100_000 + "hi" + " " * 100_000,), 1).prompts == ("hi",)


@settings(deadline=None)
@given(st.text("a 超\u1220\ud800", min_size=1, max_size=80), st.integers(200, 30_000), st.integers(2, 512))
def test_what_a_window_leaves_out_would_have_been_read(piece: str, times: int, share: int) -> None:
    (kept,) = Window((piece * times,), 1).prompts
    assert shortened(kept, WordTokenizer(), share) == shortened(piece * times, WordTokenizer(), share)


def test_prompts_have_equal_shares() -> None:
    made = features("joined")
    for count in range(1, PROMPTS + 1):
        prompts = [f"{number} " * 1000 for number in range(count)]
        made.rows([Window.of(prompts)])
        text = made.embedder.texts[-1]  # type: ignore[attr-defined]
        share = (256 - 2) // count // 2 * 2
        assert [text.split().count(str(number)) for number in range(count)] == [share] * count


def test_prompts_apart_share_the_whole_budget() -> None:
    """The embedder's own limit is one of each text, and there is a text for each prompt."""
    made = features("apart")
    made.rows([Window.of([f"{number} " * 1000 for number in range(PROMPTS)])])
    lengths = [len(text.split()) for text in made.embedder.texts]  # type: ignore[attr-defined]
    assert lengths == [(512 - 2) // PROMPTS + 1] * PROMPTS  # and the ellipsis


def test_only_the_latest_prompts_are_kept_but_all_are_counted() -> None:
    window = Window.of([str(number) for number in range(1000)])
    assert window == Window(("995", "996", "997", "998", "999"), 1000)
    assert Window.of([]) == Window((), 0)
