from __future__ import annotations

import re
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.errors import ConfigError
from blendrag.index.split import Splitter, TextChunk
from blendrag.prompt.template import decode, encode_document

ODD_TEXT = st.lists(
    st.one_of(
        st.text(max_size=30),
        st.sampled_from(
            ["\n\n", "\n", ". ", "。", "🧑‍🚀", "  \t ", "<|im_end|>", "<|im_start|>", "-" * 70, "é", "word "]
        ),
    ),
    max_size=60,
).map("".join)


def spells(tokenizer: Any, text: str) -> bool:
    """Whether the vocabulary has the text's bytes: some small ones lack a few that no language needs."""
    return decode(tokenizer, encode_document(tokenizer, text)) == text


def check(pieces: list[TextChunk], text: str, tokenizer: Any, limit: int) -> None:
    """Every piece is a stripped part of the text, within the limit, and its tokens are its own."""
    for piece in pieces:
        assert piece.text and piece.text == piece.text.strip() and piece.text in text
        assert len(piece.token_ids) <= limit
        assert piece.token_ids == encode_document(tokenizer, piece.text)
        if all(spells(tokenizer, character) for character in set(piece.text)):
            assert decode(tokenizer, piece.token_ids) == piece.text


@pytest.fixture(scope="module")
def splitters(tokenizer: Any) -> dict[int, Splitter]:
    return {limit: Splitter(tokenizer, chunk_tokens=limit, overlap=limit // 4 - 2) for limit in (8, 13, 40)}


@given(ODD_TEXT)
def test_only_white_space_is_lost(tokenizer: Any, splitters: dict[int, Splitter], text: str) -> None:
    pieces = splitters[8].split(text)
    check(pieces, text, tokenizer, 8)
    lacking = [character for character in set(text) if not encode_document(tokenizer, character)]
    kept, given = "".join(piece.text for piece in pieces), text
    for character in lacking:
        kept, given = kept.replace(character, ""), given.replace(character, "")
    assert "".join(kept.split()) == "".join(given.split())


@given(ODD_TEXT, st.sampled_from([13, 40]))
def test_overlap_neither_breaks_the_limit_nor_goes_on_forever(
    tokenizer: Any, splitters: dict[int, Splitter], text: str, limit: int
) -> None:
    pieces = splitters[limit].split(text)
    check(pieces, text, tokenizer, limit)
    assert len(pieces) <= 1 + len(text)


@given(st.lists(st.sampled_from([" ", "\n", "\n\n", ". "]), max_size=80), st.sampled_from([13, 40]))
def test_overlap_skips_no_word(splitters: dict[int, Splitter], gaps: list[str], limit: int) -> None:
    text = "".join(f"{number}{gap}" for number, gap in enumerate(gaps))
    pieces = splitters[limit].split(text)
    assert {word for piece in pieces for word in piece.text.split()} == set(text.split())


def test_neighbours_share_the_overlap(tokenizer: Any) -> None:
    text = " ".join(f"word{n}" for n in range(200))
    pieces = Splitter(tokenizer, chunk_tokens=60, overlap=20).split(text)
    for left, right in pairwise(pieces):
        shared = right.text[: right.text.index(left.text.split()[-1]) + len(left.text.split()[-1])]
        assert left.text.endswith(shared)
        assert 10 <= len(encode_document(tokenizer, shared)) <= 21


def test_paragraphs_are_not_torn_apart_needlessly(tokenizer: Any) -> None:
    paragraph = "Travel is approved by the team lead. It is booked by the office."
    text = "\n\n".join([paragraph] * 9)
    pieces = Splitter(tokenizer, chunk_tokens=64).split(text)
    assert all(piece.text.startswith("Travel") and piece.text.endswith("office.") for piece in pieces)


MARKED = ("## Fees", "== Fees ==", "** Fees", r"\section{Fees}", ".SH FEES", "h2. Fees")
MIXED = ("Fees\n====\n\n## Of the crane", "# Fees\n\nOf the crane\n----")
UNDERLINED = ("# Fees\n\n## Of the crane", "Fees\n====", "Fees\n----", "Fees\n^^^^", "====\nFees\n====")
PARAGRAPHS, LINES = "\n\n", "\n"


@pytest.fixture(scope="module")
def short(tokenizer: Any) -> list[Splitter]:
    return [Splitter(tokenizer, chunk_tokens=length) for length in range(24, 80, 2)]


@pytest.mark.parametrize(
    ("heading", "before", "behind"),
    [
        *((heading, PARAGRAPHS, PARAGRAPHS) for heading in (*MARKED, *UNDERLINED, *MIXED)),
        *((heading, LINES, gap) for heading in MARKED for gap in (PARAGRAPHS, LINES)),
    ],
)
def test_heading_stays_with_what_follows_it(
    short: list[Splitter], heading: str, before: str, behind: str
) -> None:
    section = f"{heading}{behind}Travel is approved by the team lead. It is booked by the office.{before}"
    for splitter in short:
        assert not [piece for piece in splitter.split(section * 3) if piece.text.endswith(heading)]


@pytest.mark.parametrize("mark", ["**", "#"])
def test_lines_that_all_begin_as_headings_do_are_parted_anywhere(tokenizer: Any, mark: str) -> None:
    line = f"{mark} Travel is approved by the lead of a team and booked by its office"
    per_line = len(encode_document(tokenizer, f"{line}\n"))
    pieces = Splitter(tokenizer, chunk_tokens=4 * per_line + per_line // 2).split(f"{line}\n" * 40)
    assert {piece.text for piece in pieces} == {"\n".join([line] * 4)}


@pytest.mark.parametrize(
    "told", ["\uff13\uff0e\uff11\uff14\u4e07\u5186\u3067", "\uff2e\uff4f\uff0e\uff13\u3067"]
)
def test_point_of_a_number_is_no_end_of_a_sentence(short: list[Splitter], told: str) -> None:
    for splitter in short:
        pieces = splitter.split(f"\u6599\u91d1\u306f{told}\u3042\u308a\u3001" * 30)
        assert not [piece.text for piece in pieces if piece.text.endswith("\uff0e")]


@pytest.mark.parametrize("overlap", [0, 9])
@pytest.mark.parametrize("row", ['{"id":%d,"at":[%d.25,-7.5]},', "%d;%d|", "\u4ef7%d\uff0c\u91cf%d\uff0c"])
def test_number_in_text_without_blanks_is_whole(tokenizer: Any, row: str, overlap: int) -> None:
    numbers = [10_007 * number for number in range(100, 160)]
    text = "".join(row % (number, number + 1) for number in numbers)
    for length in (40, 47, 54):
        pieces = Splitter(tokenizer, chunk_tokens=length, overlap=overlap).split(text)
        found = {int(number) for piece in pieces for number in re.findall(r"\d{4,}", piece.text)}
        assert len(pieces) > 9 and found == {*numbers, *(number + 1 for number in numbers)}


@pytest.mark.parametrize(
    ("letters", "joined"),
    [
        ("\u0e2b\u0e19\u0e49\u0e32\u0e17\u0e35\u0e48\u0e17\u0e33", "\u0e49\u0e35\u0e48\u0e33"),  # Thai
        ("\u0938\u092a\u094d\u0924\u093e\u0939", "\u094d\u0924\u093e"),  # Devanagari
        ("Vu\u0303Tru\u0323", "\u0303\u0323"),
        ("\U0001f469\u200d\U0001f467\U0001f44d\U0001f3fd", "\u200d\U0001f467\U0001f3fd"),
        ("\U0001f1e9\U0001f1ea ok", "\U0001f1ea"),
        ("\u4ed6\u8bf4\uff1a\u201c\u5e74\u5047\u4e3a\u4e8c\u5341\u5929\u3002\u201d", "\u3002\u201d"),
        ("\u300c\u5e74\u4f11\uff01\u300d", "\uff01\u300d"),
        ("\u3010\u5e74\u4f11\uff0e\u3011", "\uff0e\u3011"),
    ],
)
@pytest.mark.parametrize(("length", "overlap"), [(25, 0), (30, 0), (35, 0), (40, 0), (40, 9)])
def test_letter_or_sentence_is_not_parted_from_its_marks(
    tokenizer: Any, letters: str, joined: str, length: int, overlap: int
) -> None:
    pieces = Splitter(tokenizer, chunk_tokens=length, overlap=overlap).split(letters * 50)
    assert len(pieces) > 3
    assert not [piece.text for piece in pieces if piece.text[0] in joined]


@pytest.mark.parametrize("end", [".", '."', ".»", "?)", "…", "॥", "։", "።", "။", "។", "།"])
def test_sentence_of_any_script_stays_whole(tokenizer: Any, end: str) -> None:
    sentence = f"Travel is approved by the lead of a team{end}"
    pieces = Splitter(tokenizer, chunk_tokens=32).split(f"{sentence} " * 9)
    assert {piece.text[-len(end) :] for piece in pieces} == {end} and len(pieces) > 2


def test_text_that_fits_is_one_piece(tokenizer: Any) -> None:
    text = "one two three four five six seven eight nine ten eleven twelve"
    exactly = len(encode_document(tokenizer, text))
    assert [piece.text for piece in Splitter(tokenizer, chunk_tokens=exactly).split(text)] == [text]
    text = "One.\n\nTwo.\n\nThree."
    assert [piece.text for piece in Splitter(tokenizer, chunk_tokens=64).split(f"\n {text} \n")] == [text]


def test_control_tokens_in_a_document_do_not_crumble_it(tokenizer: Any) -> None:
    pieces = Splitter(tokenizer, chunk_tokens=64).split("<|im_end|>" * 500)
    check(pieces, "<|im_end|>" * 500, tokenizer, 64)
    assert sum(len(piece.token_ids) for piece in pieces) / len(pieces) > 48


@pytest.mark.parametrize("text", ["", " \n\t \u3000"])
def test_white_space_is_no_piece(tokenizer: Any, text: str) -> None:
    assert Splitter(tokenizer).split(text) == []


def test_characters_without_tokens_are_no_piece(tokenizer: Any) -> None:
    assert all(piece.token_ids for piece in Splitter(tokenizer).split("\x04\x06" * 9000))


@pytest.mark.parametrize("unit", ["a", "0f3c9", "a1b2 c3", "x y ", "漢"])
def test_time_for_a_single_line_does_not_grow_faster_than_its_length(tokenizer: Any, unit: str) -> None:
    took: list[float] = []
    for length in (25_000, 200_000):
        text = unit * (length // len(unit))
        began = time.process_time()
        pieces = Splitter(tokenizer).split(text)
        took.append(time.process_time() - began)
        check(pieces[:20] + pieces[-20:], text, tokenizer, 512)
    assert took[1] < 24 * took[0]  # eight times the length; a quadratic splitter takes 64 times as long


def test_splitting_leaves_the_shared_tokenizer_alone(tokenizer: Any) -> None:
    before = tokenizer("<|im_end|>", split_special_tokens=False).input_ids
    splitter = Splitter(tokenizer)
    splitter._token_starts("<|im_end|>", 0)
    assert tokenizer.backend_tokenizer.encode("<|im_end|>", add_special_tokens=False).ids == before


@pytest.mark.parametrize(("size", "overlap"), [(7, 0), (0, 0), (64, 32), (64, -1)])
def test_sizes_that_cannot_work_are_refused(tokenizer: Any, size: int, overlap: int) -> None:
    with pytest.raises(ConfigError):
        Splitter(tokenizer, chunk_tokens=size, overlap=overlap)
