"""Documents in many scripts and layouts: a plan spells the whole prompt, and claims only what is there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unicodedata import normalize

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import normalizers

from blendrag.prompt import (
    PromptPlan,
    Recogniser,
    decode,
    encode_document,
    plan_chat,
    plan_prompt,
    render_chat,
)
from blendrag.prompt.template import changes_letters

MIN_TOKENS = 8
ANCHOR = 32

PASSAGES = [
    # accents as one character (NFC), and as two (NFD)
    "Müller fährt über Österreich nach Zürich; die Gebühr beträgt fünfzig Franken, zahlbar vor Übergabe.",
    normalize(
        "NFD", "Đường về nhà dài và vắng, nhưng ngọn đèn cuối phố vẫn sáng suốt đêm cho người đi muộn."
    ),
    # line ends, tabs, blanks at the end of lines
    "Invoice\r\n\r\nItem\tPrice\r\nBolt\t0.20\r\nNut\t0.10\r\n\r\nPayable within thirty days of receipt.\r\n",
    "Trailing   \nblanks \t\nat the ends of lines  \n\n\n\nand several empty lines, as in pages that were \n"
    "converted from some other format, two columns    side    by    side. ",
    # emoji of several code points: families, skin tones, flags, keycaps, variation selectors
    "Menu 🍜🍣: 👩‍👩‍👧‍👦 family table, 👍🏽 liked by 🇨🇭🇯🇵 guests, ❤️ or ❤, 1️⃣ starter, 2️⃣ main, 🏳️‍🌈 welcome! ",
    # right to left, with marks and digits that run the other way
    "سياسة السفر: يوافق رئيس القسم على الرحلات قبل 14 يومًا، وتُسلَّم الإيصالات خلال 10 أيام من العودة. ",
    "שָׁלוֹם עוֹלָם \u200f(מדריך 2024)\u200e לפני הנסיעה יש לבקש אישור בכתב ממנהל המחלקה, ולשמור את כל הקבלות.",
    # no blanks between words; a few characters outside the basic plane
    "第三章　出張旅費は部長の承認を得て精算する。領収書は十日以内に提出。𠮷野家での食事は対象外とする。",
]

FORMS: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "NFC": lambda text: normalize("NFC", text),
    "NFD": lambda text: normalize("NFD", text),
    "NFKC": lambda text: normalize("NFKC", text),
    "LF": lambda text: text.replace("\r\n", "\n"),
    "CRLF": lambda text: text.replace("\r\n", "\n").replace("\n", "\r\n"),
    "no tabs": str.expandtabs,
    "stripped": str.strip,
    "no blanks at line ends": lambda text: "\n".join(line.rstrip() for line in text.split("\n")),
    "no marks": lambda text: text.replace("\u200f", "").replace("\u200e", "").replace("\ufe0f", ""),
    "capitals": str.upper,
}

passages, forms = st.sampled_from(PASSAGES), st.sampled_from(list(FORMS.values()))

# The default model's vocabulary lacks some control characters and the planes above 3.
writable = st.characters(exclude_categories=["Cc", "Cs"], include_characters="\r\n\t", max_codepoint=0x3FFFF)


def planned(tokenizer: Any, texts: list[str], content: str) -> tuple[PromptPlan, list[tuple[int, str, str]]]:
    """The plan of a chat about ``content``, checked; (start in content, matched text, known text) each."""
    recogniser = Recogniser(tokenizer, min_tokens=MIN_TOKENS)
    for at, text in enumerate(texts):
        recogniser.add(str(at), text, encode_document(tokenizer, text))
    messages = [{"role": "system", "content": f"\n{content}"}, {"role": "user", "content": "Who?"}]
    plan = plan_chat(messages, tokenizer, recogniser)

    rendered = render_chat(tokenizer, messages)
    assert plan.text == rendered == decode(tokenizer, plan.token_ids)
    found, at = [], -rendered.index(content)
    for segment in plan.segments:
        if segment.chunk_key is not None:
            known = texts[int(segment.chunk_key)]
            assert known.startswith(segment.text) and decode(tokenizer, segment.token_ids) == segment.text
            assert encode_document(tokenizer, known)[: len(segment.token_ids)] == segment.token_ids
            found.append((at, segment.text, known))
        at += len(segment.text)
    return plan, found


def shared(one: str, other: str) -> int:
    """Characters that the two have in common at the start."""
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def longest_prefix(tokenizer: Any, text: str, characters: int) -> int:
    """How many of the text's first ids spell at most its first ``characters``, by trying them all."""
    ids = encode_document(tokenizer, text)
    heads = ((count, decode(tokenizer, ids[:count])) for count in range(len(ids), 0, -1))
    return next((count for count, head in heads if len(head) <= characters and text.startswith(head)), 0)


@given(passages, forms, forms)
def test_other_form_of_a_text_is_never_taken_for_it(
    tokenizer: Any, passage: str, ingested_as: Callable[[str], str], shown_as: Callable[[str], str]
) -> None:
    text, shown = ingested_as(passage), shown_as(passage)
    _, found = planned(tokenizer, [text], f"{shown}\n---\n")
    whole = [matched for _, matched, known in found if matched == known]
    assert len(whole) == (f"{shown}\n---\n").count(text)
    assert all(len(matched) <= shared(text, shown) for _, matched, _ in found if not whole)


@pytest.mark.parametrize(
    "text", [PASSAGES[1], "A coil of 12 \u2126, and a fuse of 3 \u2126 at 20 \u00b0C. " * 3]
)
def test_text_is_found_as_tokenizers_spell_it_that_put_letters_in_normal_form(
    tokenizer: Any, text: str
) -> None:
    normalising = copy.deepcopy(tokenizer)
    normalising.backend_tokenizer.normalizer = normalizers.NFC()
    recogniser = Recogniser(normalising, min_tokens=MIN_TOKENS)
    recogniser.add("0", text, encode_document(normalising, text))
    asked = [{"role": "user", "content": f"{text}\n\nWho?"}]
    read = decode(normalising, encode_document(normalising, f"{text}\n\nWho?"))  # as a server does
    cut = f"{normalize('NFC', text)[:80]} #"
    assert text not in read and [match.end for match in recogniser.find(cut)] == [pytest.approx(80, abs=9)]
    for plan in (plan_chat(asked, normalising, recogniser), plan_prompt(read, normalising, recogniser)):
        assert plan.cached_keys == ("0",) and plan.notes[0].reason == "found"
    recogniser.remove("0")
    assert recogniser.find(text) == recogniser.find(read) == []


def test_text_of_which_a_tokenizer_changes_only_blanks_is_not_spelt_anew(tokenizer: Any) -> None:
    """As SentencePiece's does: to decode every document that has an ellipsis would take a while."""
    of_blanks = copy.deepcopy(tokenizer)
    of_blanks.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    assert not changes_letters(of_blanks, "Lunch \u2026 is at noon.")
    of_blanks.backend_tokenizer.normalizer = normalizers.NFKC()
    assert changes_letters(of_blanks, "Lunch \u2026 is at noon.")


@given(passages.map(lambda text: 4 * text), st.data())
def test_partly_present_document_does_not_reuse_less_than_its_longest_prefix(
    tokenizer: Any, text: str, data: st.DataObject
) -> None:
    shown = text[: data.draw(st.integers(0, len(text) - 1), "cut")]
    after = data.draw(st.sampled_from(["", "\n\n", " #", "\u200d🙂"]), "after")
    common = shared(text, f"{shown}{after}")
    plan, found = planned(tokenizer, [text], f"Pages: {shown}{after}")
    longest = longest_prefix(tokenizer, text, common)
    assert plan.cached_tokens == (longest if longest >= MIN_TOKENS and common >= ANCHOR else 0)
    assert all(start == len("Pages: ") for start, _, _ in found)


def cut_up(text: str, size: int, overlap: int) -> list[str]:
    """The text as a splitter cuts it, each chunk beginning with the end of the one before."""
    starts = range(0, max(len(text) - overlap, 1), size - overlap)
    return [text[start : start + size].strip() for start in starts]


@given(st.lists(passages, min_size=1, max_size=3, unique=True), st.data())
def test_overlapping_repeated_and_nested_chunks_do_not_hide_each_other(
    tokenizer: Any, documents: list[str], data: st.DataObject
) -> None:
    size = data.draw(st.integers(50, 120), "size")
    overlap = data.draw(st.integers(0, size // 2), "overlap")
    # Each document, its chunks, and chunks of these: many texts that begin or lie in one another.
    texts = [*documents, *(chunk for document in documents for chunk in cut_up(document, size, overlap))]
    texts = [
        text
        for text in dict.fromkeys([*texts, *(text[5:45].strip() for text in texts)])
        if len(text) >= ANCHOR
    ]
    placed = data.draw(st.lists(st.sampled_from(texts), max_size=5), "placed")
    separator = data.draw(st.sampled_from(["\n---\n", "\nSource 2:\n", "<|im_end|>"]), "separator")

    _, found = planned(tokenizer, texts, "".join(f"{text}{separator}" for text in placed) + ".")
    matched, at = {start: text for start, text, _ in found}, 0
    for text in placed:
        assert matched[at].startswith(text), "every placed text is found, or a longer one that begins with it"
        at += len(text) + len(separator)


@given(st.lists(st.text(writable, min_size=16, max_size=80), min_size=1, max_size=4), st.data())
def test_random_texts_are_not_claimed_where_they_are_not(
    tokenizer: Any, texts: list[str], data: st.DataObject
) -> None:
    piece = st.one_of(
        st.text(writable, max_size=30),
        st.sampled_from(texts),
        st.sampled_from(texts).flatmap(lambda text: st.integers(1, len(text)).map(lambda cut: text[:cut])),
    )
    content = "".join(data.draw(st.lists(piece, max_size=6), "content"))
    assume(content)
    _, found = planned(tokenizer, texts, content)
    for start, matched, _ in found:
        assert content.startswith(matched, start)
