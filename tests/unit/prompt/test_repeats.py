"""Texts that several prompts hold are found behind borders of their own, and nothing else is."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.prompt import Recogniser, Sightings, encode_document, plan_prompt
from blendrag.prompt.plan import PromptPlan, Segment
from blendrag.prompt.repeats import _phrases

WORDS = [
    "travel", "approved", "head", "department", "receipts", "handed", "within", "ten", "days", "return",
    "lunch", "served", "noon", "laptop", "replaced", "every", "four", "years", "desk", "locks", "devices",
    "at", "once", "owner", "files", "statement", "of", "the", "by", "in", "is", "are", "from", "help",
]  # fmt: skip


def document(seed: int, sentences: int = 14) -> str:
    """A page of some 150 tokens: a heading, and sentences on lines of several lengths."""
    rng = random.Random(seed)
    said = [
        " ".join(rng.choices(WORDS, k=rng.randint(6, 14))).capitalize()
        + rng.choice([".", ".\n", "?\n\n", "!\n"])
        for _ in range(sentences)
    ]
    return (f"The page of {rng.choice(WORDS)} with the number {seed}\n\n" + " ".join(said)).strip()


PAGES = [document(seed) for seed in range(12)]
FRAMES: dict[str, Callable[[int, str], str]] = {
    "plain": lambda at, text: f"\n\n{text}",
    "numbered": lambda at, text: f"\n[{at}] {text}\n",
    "list": lambda at, text: f"\n{at}. {text}",
    "labelled": lambda at, text: f"\nDocument {at}: {text}\n---\n",
    "tagged": lambda at, text: f'<source id="{at}">{text}</source>\n',
    "quoted": lambda at, text: f"\n[{at}] «{text}»",
}


def prompt(frame: Callable[[int, str], str], pages: Sequence[str], question: str) -> str:
    found = "".join(frame(at, page) for at, page in enumerate(pages, 1))
    return f"<|im_start|>user\nRead this for {question}:\n{found}\n\nSo what of {question}?<|im_end|>\n"


@pytest.fixture
def known(tokenizer: Any) -> Recogniser:
    return Recogniser(tokenizer)


@pytest.fixture
def note(tokenizer: Any, known: Recogniser) -> Callable[..., list[str]]:
    sightings = Sightings(tokenizer, 512)
    return lambda text, held=None: sightings.note(plan_prompt(text, tokenizer, known), held)


@pytest.mark.parametrize("frame", FRAMES.values(), ids=list(FRAMES))
def test_document_gives_the_same_text_whatever_stands_around_it(
    frame: Callable[[int, str], str], tokenizer: Any, known: Recogniser
) -> None:
    met = dict[str, set[str]]()
    for seed in range(8):
        rng, sightings = random.Random(seed), Sightings(tokenizer, 512)
        first, second = rng.sample(PAGES, 5), rng.sample(PAGES, 5)
        neighbours = set(itertools.pairwise(first)) & set(itertools.pairwise(second))
        sightings.note(plan_prompt(prompt(frame, first, "tea"), tokenizer, known))
        again = sightings.note(plan_prompt(prompt(frame, second, "coffee"), tokenizer, known))
        common = [page for page in second if page in first]
        if neighbours or first[0] == second[0]:
            continue
        assert len(again) == len(common)
        for page, text in zip(common, again, strict=True):
            assert text in page and len(text) > 0.9 * len(page)
            met.setdefault(page, set()).add(text)
    assert len(met) > 5 and all(len(texts) == 1 for texts in met.values())


def test_one_line_of_json_is_cut_at_its_strings(note: Any) -> None:
    def answer(pages: Sequence[str]) -> str:
        rows = [{"content": page, "distance": 0.1 * at} for at, page in enumerate(pages)]
        return f"The tool said: {json.dumps(rows)}. What follows?"

    assert note(answer(PAGES[:3])) == []
    found = note(answer([PAGES[5], PAGES[2], PAGES[0]]))
    written = [json.dumps(page)[1:-1] for page in (PAGES[2], PAGES[0])]
    assert [len(text) > 0.9 * len(page) and text in page for text, page in zip(found, written, strict=True)]


def test_text_without_any_sign_is_cut_by_a_rolling_hash(note: Any) -> None:
    rng = random.Random(0)
    blob = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=3000))
    assert note(f"First: {blob} and what is it?") == []
    found = "".join(note(f"Of another beginning, {rng.random()} and {blob}, is there more?"))
    assert found in blob and len(found) > 0.9 * len(blob)


def test_what_prompts_begin_with_is_left_to_the_prefix_cache(note: Any, tokenizer: Any) -> None:
    system = f"<|im_start|>system\n{PAGES[0]}<|im_end|>\n<|im_start|>user\n"
    assert note(f"{system}{PAGES[1]} Why is that so?<|im_end|>\n") == []
    turn = f"{system}{PAGES[1]} Why is that so?<|im_end|>\n<|im_start|>assistant\n{PAGES[2]}<|im_end|>\n"
    assert note(turn) == note(f"{turn}<|im_start|>user\nAnd what else is there?<|im_end|>\n") == []
    assert note(turn) == [], "asked once more"
    (found,) = note(f"{system}{PAGES[3]} Now, of {PAGES[1]} and why?<|im_end|>\n")
    assert found[-40:] in PAGES[1]


def test_of_a_blended_prompt_only_what_the_cache_had_is_left_out(note: Any, tokenizer: Any) -> None:
    text = f"<|im_start|>system\n{PAGES[0]}<|im_end|>\n<|im_start|>user\nOf what, please?"
    held = len(encode_document(tokenizer, PAGES[0])) + 4
    assert note(text, 0) == note(text, held) == []
    assert note(text, 0) == [PAGES[0]]


def test_question_and_what_is_said_behind_it_is_no_document(note: Any) -> None:
    def asked(page: str, question: str) -> str:
        return f"{page}\n\nThe question is: {question}?\n\n{PAGES[11]}"

    assert note(asked(PAGES[0], "how long does it take to go there")) == []
    assert note(asked(PAGES[1], "how many people have been there before")) == []
    (found,) = note(asked(f"Now this.\n{PAGES[1]}", "where has all of it gone"))
    assert found.removesuffix("\n\nThe question is:") in PAGES[1]


def test_what_is_known_is_not_found_again(note: Any, known: Recogniser, tokenizer: Any) -> None:
    known.add("key", PAGES[0], encode_document(tokenizer, PAGES[0]))
    note(prompt(FRAMES["plain"], PAGES[:2], "tea"))
    (found,) = note(prompt(FRAMES["plain"], [PAGES[4], PAGES[0], PAGES[5], PAGES[1]], "coffee"))
    assert found in PAGES[1]


def test_text_that_stands_twice_in_one_prompt_is_not_repeated_by_prompts(note: Any) -> None:
    assert note(f"{PAGES[0]}\n\nand\n\n{PAGES[1]}\n\nand again\n\n{PAGES[0]}\n\nWhy?") == []


def test_control_token_is_in_no_text(note: Any, tokenizer: Any) -> None:
    middle = f"{PAGES[0]}<|im_end|>\n<|im_start|>user\n{PAGES[1]}"
    note(f"First of all, {middle} What is asked here?")
    found = note(f"Something else {middle} What is asked there?")
    assert len(found) == 2 and not any("<|im_" in text for text in found)


def test_long_text_comes_in_parts(note: Any, tokenizer: Any) -> None:
    long = "\n\n".join(document(seed) for seed in range(100, 120))
    note(f"First. {long} What is it that is asked?")
    parts = note(f"Second, and not the first. {long} What else is asked for?")
    sizes = [len(encode_document(tokenizer, part)) for part in parts]
    assert len(parts) > 5 and max(sizes) < 1.3 * 512 and sum(map(len, parts)) > 0.95 * len(long)


@pytest.mark.parametrize(
    "unit", ["a", "ab ", "\n", '"', "Same line here, once more.\n", "\\", "。", "<a>", "\ufffd"]
)
def test_megabyte_of_one_thing_is_read_in_time_and_gives_no_more_than_it_has(
    unit: str, tokenizer: Any
) -> None:
    text = (unit * (1 << 20))[: 1 << 20]
    plan = PromptPlan((Segment(f"x{text}", (0,) * (len(text) // 4)),))
    sightings = Sightings(tokenizer, 512)
    sightings.note(plan, 0)
    table = sightings._table.nbytes
    assert sum(map(len, sightings.note(plan, 0))) <= len(text) + 1
    assert sightings._table.nbytes == table <= 16 << 20


def test_near_repeats_are_not_taken_for_repeats(note: Any) -> None:
    form = "Dear {0}, the order {0} of {0} has been sent to {0} and will be there by {0}, as {0} was told.\n"
    letters = ["".join(form.format(at * 7919 + line) for line in range(40)) for at in range(20)]
    assert [found for letter in letters for found in note(letter)] == []


def test_oldest_sightings_are_forgotten_and_the_latest_are_not(
    note: Any, monkeypatch: Any, tokenizer: Any
) -> None:
    monkeypatch.setattr("blendrag.prompt.repeats._SETS", 64)
    sightings, known = Sightings(tokenizer, 512), Recogniser(tokenizer)

    def seen(text: str) -> int:
        return len(sightings.note(plan_prompt(f"{text} What of it, please?", tokenizer, known), 0))

    assert seen(PAGES[0]) == 0
    for seed in range(1000, 1100):
        seen(document(seed))
    assert seen(document(1099)) == 1 and seen(PAGES[0]) == 0


def test_no_two_tenants_have_the_same_hashes(tokenizer: Any, known: Recogniser) -> None:
    plan = plan_prompt(prompt(FRAMES["plain"], PAGES[:2], "tea"), tokenizer, known)
    one, other = Sightings(tokenizer, 512), Sightings(tokenizer, 512)
    one.note(plan)
    assert other.note(plan) == []
    kept = [{*sightings._table[sightings._table != 0].tolist()} for sightings in (one, other)]
    assert len(kept[0]) > 20 and kept[0].isdisjoint(kept[1])


@given(st.text(max_size=600), st.integers(1, 40))
def test_phrases_are_in_order_and_apart(text: str, times: int) -> None:
    edges = [edge for phrase in _phrases(text * times) for edge in phrase]
    assert edges == sorted(edges) and (not edges or (edges[0] >= 0 and edges[-1] <= len(text) * times))


@given(st.lists(st.text(max_size=300), min_size=1, max_size=4), st.integers(0, 3))
def test_texts_found_are_in_the_prompt(tokenizer: Any, parts: list[str], held: int) -> None:
    text = "\n\n".join(part * 8 for part in parts)
    plan = PromptPlan((Segment(f"-{text}", (0,) * (len(text) + 1)), Segment(PAGES[0], (1,) * 9)))
    sightings = Sightings(tokenizer, 96)
    sightings.note(plan, 0)
    for found in sightings.note(plan, held):
        assert found and found in plan.text
