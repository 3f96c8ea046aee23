"""What an index of 100,000 chunks costs: time to find eight of them, bytes to keep them."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

from blendrag.prompt import Recogniser, encode_document

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
