from __future__ import annotations

import threading
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.prompt import Match, Recogniser, decode, encode_document
from blendrag.prompt.recognise import gaps


class Letters:
    """One token per character: what the recogniser needs of a tokenizer, with nothing to merge."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))


def spell(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


TEXT = "A text that is long enough to have an anchor of its own."


def known_as(texts: list[str], **options: Any) -> Recogniser:
    recogniser = Recogniser(Letters(), **options)
    for at, text in enumerate(texts):
        recogniser.add(str(at), text, spell(text))
    return recogniser


def spans(matches: list[Match]) -> list[tuple[int, int, str]]:
    return [(match.start, match.end, match.key) for match in matches]


def by_naive_search(texts: list[str], prompt: str, min_tokens: int) -> list[tuple[int, int]]:
    """What ``find`` promises, by trying everything everywhere."""
    found: list[tuple[int, int]] = []
    every = {
        at: match for at in range(len(prompt)) if (match := by_naive_match(texts, prompt, at, min_tokens))
    }
    begin, (end, _) = next(iter(every.items()), (0, (0, False)))
    while begin < end:
        repeats = [
            at
            for at in range(begin + 1, end)
            if at in every and prompt[at : every[at][0]] == prompt[begin:end]
        ]
        inside = {
            at: every[at][0]
            for at in range(begin + 1, min(repeats, default=end))
            if at in every and every[at][1] and every[at][0] > end
        }
        if end in every:
            inside[end] = every[end][0]
        then = max(inside, key=lambda at: (inside[at], at), default=end)
        if then < end and not (then - begin >= min_tokens and end - begin > min_tokens):
            if inside[then] - then > end - begin:
                begin, end = then, inside[then]
                continue
            then = end
        elif then < end:
            end = then
        found.append((begin, end))
        begin = next((at for at in every if at >= end), len(prompt))
        end = every[begin][0] if begin in every else begin
    return found


def by_naive_match(texts: list[str], prompt: str, at: int, min_tokens: int) -> tuple[int, bool] | None:
    """Where the longest match ends that begins there, and whether it is whole."""
    best = None
    for text in texts:
        if len(text) >= 16 and prompt.startswith(text[: 32 if len(text) >= 32 else 16], at):
            n = next((n for n in range(len(text)) if prompt[at + n : at + n + 1] != text[n]), len(text))
            if n >= min_tokens or n == len(text):
                best = max(best or (0, False), (at + n, n == len(text)))
    return best


# Few letters and shared beginnings, so that overlaps, repeats and texts inside texts are common.
words = st.text("ab", min_size=1, max_size=6)
headings = st.sampled_from(["", "a" * 16, "ab" * 16, "b" * 40])
chunks = st.builds(lambda heading, tail: heading + "".join(tail), headings, st.lists(words, max_size=12))
known_texts = st.lists(chunks.filter(bool), min_size=1, max_size=8, unique=True)


@given(known_texts, st.data())
def test_find_never_differs_from_naive_search(texts: list[str], data: st.DataObject) -> None:
    pieces = st.lists(st.one_of(words, st.sampled_from(texts), st.sampled_from(texts).map(lambda t: t[:37])))
    prompt = "".join(data.draw(pieces))
    matches = known_as(texts, min_tokens=34).find(prompt)
    assert [(match.start, match.end) for match in matches] == by_naive_search(texts, prompt, 34)
    for match in matches:
        assert prompt[match.start : match.end] == Letters().decode(list(match.token_ids))


@pytest.mark.parametrize(("overlap", "taken"), [(0, 300), (20, 300), (60, 300), (900, 1200)])
def test_as_few_chunks_that_overlap_are_reused_as_reach_as_far(
    tokenizer: Any, overlap: int, taken: int
) -> None:
    page = " ".join(
        f"Item {at * 7} of the list is kept in shed {at * 3}, behind crane {at}." for at in range(60)
    )
    recogniser = Recogniser(tokenizer)
    for at in range(0, len(page), 300):
        text = page[at : at + 300 + overlap]
        recogniser.add(str(at), text, encode_document(tokenizer, text))
    matches = recogniser.find(f"Look: {page} Where is crane 7?")
    assert [match.key for match in matches] == [str(at) for at in range(0, len(page), taken)]
    left = gaps(matches, len(page) + 6)[1:]
    assert all(end - begin < 12 for begin, end in left), "no more than a token at a cut"


def test_heading_whose_end_begins_a_page_does_not_hide_the_page(tokenizer: Any) -> None:
    page = "Handbook of the company, page 7. " + "Travel is approved by the head of the department. " * 9
    heading = "Third edition. " + page[:32]
    recogniser = Recogniser(tokenizer)
    for key, text in (("heading", heading), ("page", page)):
        recogniser.add(key, text, encode_document(tokenizer, text))
    assert [match.key for match in recogniser.find("Third edition. " + page)] == ["page"]


def test_text_that_repeats_itself_is_searched_as_fast_as_any() -> None:
    recogniser = known_as(["a" * 64])
    assert len(recogniser.find("a" * 64_000)) == 1000
    looks = []
    longest = recogniser._longest
    recogniser._longest = lambda *of: looks.append(of) or longest(*of)  # type: ignore[method-assign, func-returns-value]
    recogniser.find("a" * 64_000)
    assert len(looks) < 3000


@given(known_texts, st.lists(st.integers(0, 7), max_size=6), st.data())
def test_removed_texts_are_not_found_and_others_not_lost(
    texts: list[str], removed: list[int], data: st.DataObject
) -> None:
    recogniser = known_as(texts, min_tokens=34)
    for at in removed:
        recogniser.remove(str(at))
    left = [text for at, text in enumerate(texts) if at not in removed]
    prompt = "".join(data.draw(st.lists(st.one_of(words, st.sampled_from(texts)))))
    matches = recogniser.find(prompt)
    assert [(match.start, match.end) for match in matches] == by_naive_search(left, prompt, 34)


@given(known_texts, st.lists(st.integers(0, 9).map(str), max_size=3), st.text("ab", max_size=400))
def test_hints_never_make_matches_overlap(texts: list[str], hints: list[str], prompt: str) -> None:
    prompt += texts[0] + prompt[:50] + texts[-1]
    matches = known_as(texts).find(prompt, hints=[*hints, texts[0], prompt[:60]])
    ends = [0, *(match.end for match in matches)]
    assert all(match.start >= end for match, end in zip(matches, ends, strict=False))
    assert all(
        prompt.startswith(match.known.text[: match.end - match.start], match.start) for match in matches
    )


def test_hint_does_not_lose_to_a_longer_match() -> None:
    short, long = "the travel policy", "Everything on the travel policy, and on how to claim expenses back."
    recogniser = known_as([short, long])
    assert [match.key for match in recogniser.find(long)] == ["1"]
    for hint in (short, "0"):
        assert [match.key for match in recogniser.find(long, hints=[hint])] == ["0"]


def test_text_too_short_to_scan_for_is_found_when_hinted() -> None:
    recogniser = known_as(["Yes."])
    assert recogniser.find("Is it? Yes.") == []
    assert spans(recogniser.find("Is it? Yes.", hints=["Yes."])) == [(7, 11, "0")]


def test_adding_a_key_twice_does_not_need_two_removals() -> None:
    recogniser = known_as([TEXT])
    recogniser.add("0", TEXT, spell(TEXT))
    assert len(recogniser) == 1
    recogniser.remove("0")
    recogniser.remove("0")
    assert recogniser.find(TEXT) == [] and len(recogniser) == 0


def test_removing_one_of_two_keys_with_the_same_text_does_not_lose_the_other() -> None:
    recogniser = known_as([TEXT, TEXT])
    recogniser.remove("0")
    assert spans(recogniser.find(TEXT)) == [(0, len(TEXT), "1")]


def test_lone_surrogate_does_not_break_the_scan() -> None:
    assert spans(known_as([TEXT]).find("\ud800" + TEXT)) == [(1, 1 + len(TEXT), "0")]


def test_partial_match_never_ends_inside_a_character(tokenizer: Any) -> None:
    text = "Prices in März – see 第三章 😀😀😀 👩‍👩‍👧 and the rest, 価格は三月に上がる."
    ids = encode_document(tokenizer, text)
    recogniser = Recogniser(tokenizer, min_tokens=4)
    recogniser.add("k", text, ids)
    for length in range(32, len(text)):
        (match,) = recogniser.find(text[:length] + "\x00")
        reused = decode(tokenizer, match.token_ids)
        assert reused == text[: match.end] and match.end <= length
        more = range(len(match.token_ids) + 1, len(ids))
        longer = [n for n in more if text[:length].startswith(decode(tokenizer, ids[:n]))]
        assert not longer, "a longer prefix of the ids would have fitted"


def test_concurrent_changes_do_not_lose_texts() -> None:
    heading = "One heading that all of the texts begin with: "
    stays = [heading + f"number {at}" for at in range(50)]
    recogniser = known_as(stays)

    def churn(name: str) -> None:
        for at in range(100):
            recogniser.add(f"{name}{at}", f"{heading}{name}{at}", (1,))
            recogniser.remove(f"{name}{at}")

    threads = [threading.Thread(target=churn, args=(name,)) for name in "xyz"]
    for thread in threads:
        thread.start()
    for text in stays:
        assert [match.known.text for match in recogniser.find(f"Look: {text}!")] == [text]
    for thread in threads:
        thread.join()
    assert len(recogniser) == len(stays)


# -- what an index of 100,000 chunks costs --------------------------------------------------------------

CHARACTERS, TOKENS, PLACED = 2000, 512, 8
_BODY = "Travel is approved by the head of the department; receipts are handed in within ten days. " * 23


def chunk(at: int) -> str:
    """Pages that differ in a number behind a heading, which is the hardest for an index of beginnings."""
    return f"Handbook of the company, third edition, page {at:06d}.\n{_BODY}"[:CHARACTERS]


def best_ms(recogniser: Recogniser, prompt: str, whole: bool) -> float:
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        matches = recogniser.find(prompt)
        times.append(1e3 * (time.perf_counter() - begin))
        assert [match.whole for match in matches] == [whole] * PLACED
    return min(times)


def test_finding_eight_of_100_000_chunks_does_not_take_5_ms(tokenizer: Any) -> None:
    count = 100_000
    recogniser, stride = Recogniser(tokenizer), count // PLACED
    ids = {at: encode_document(tokenizer, chunk(at)) for at in range(0, count, stride)}
    begin = time.process_time()
    for at in range(count):
        recogniser.add(f"{at:032x}", chunk(at), ids.get(at, ids[0]), "handbook.md")
    built = time.process_time() - begin

    placed = [chunk(at) for at in ids]
    whole = "\n\n".join(placed)
    cut = "\n\n".join(f"{text[:1900]}#" for text in placed)
    assert 15_000 < len(cut) < len(whole) < 17_000
    took = best_ms(recogniser, whole, True), best_ms(recogniser, cut, False)
    print(f"{count} chunks: {built:.1f} s CPU to build; {took[0]:.2f} ms to find, {took[1]:.2f} if cut")
    assert took[0] < 5


def test_chunk_does_not_take_more_bytes_than_its_text_and_packed_ids(tokenizer: Any) -> None:
    count = 2000
    recogniser = Recogniser(tokenizer)
    tracemalloc.start()
    for at in range(count):
        recogniser.add(f"{at:032x}", chunk(at), range(at, at + TOKENS), "handbook.md")
    each = tracemalloc.get_traced_memory()[0] / count
    tracemalloc.stop()
    print(f"{each:.0f} bytes for a chunk of {CHARACTERS} characters and {TOKENS} tokens")
    assert each < CHARACTERS + 4 * TOKENS + 1000


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.decoded = tokenizer, 0

    def decode(self, ids: list[int], **options: Any) -> Any:
        self.decoded += len(ids)
        return self._tokenizer.decode(ids, **options)


def test_chunk_that_is_cut_short_is_not_decoded_at_every_guess(tokenizer: Any) -> None:
    counting, page = Counting(tokenizer), chunk(0)
    recogniser, ids = Recogniser(counting), encode_document(tokenizer, page)
    recogniser.add("key", page, ids)
    assert not recogniser.find(f"{page[:-100]}#")[0].whole
    assert counting.decoded < 6 * len(ids)


def test_page_that_begins_with_a_rule_is_not_decoded_at_every_rule_of_a_prompt(tokenizer: Any) -> None:
    counting, page = Counting(tokenizer), "-" * 40 + f"\n{_BODY}"
    recogniser = Recogniser(counting)
    recogniser.add("key", page, encode_document(tokenizer, page))
    assert recogniser.find(("-" * 79 + "\n" + "x" * 120) * 80) == []
    assert counting.decoded < 100
