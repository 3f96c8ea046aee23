"""Texts that several prompts hold, found without anybody naming them (content-defined chunking).

A prompt is read as phrases: what stands between line ends, quotes, brackets, tags and ends of sentences, and
where there are none of these for long, between places at which a rolling hash says so. So a document has the
same phrases whatever stands around it, and however it is numbered. Of a prompt, only hashes of each two
phrases that follow each other are remembered. Where those of a later prompt are known one after the other,
an earlier prompt held the same text. Where one document ends and the next begins, the two phrases are new to
each other, unless these documents stood in that order before.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby, pairwise
from math import ceil
from typing import Any

import numpy as np

from blendrag.prompt.anchors import rolling_hashes
from blendrag.prompt.plan import PromptPlan
from blendrag.prompt.template import control_tokens

_PHRASE = re.compile(
    # Of what ends a phrase, a sign of Latin scripts has to stand before a blank or another sign: 3.5, a.b.
    r"(?:[^BREAK.!?:;。！？：；]++|[.!?:;]++(?=\w))++[.!?:;。！？：；]*+".replace(
        "BREAK", r"""\n\r\t"<>(){}\[\]|\\«»“”"""
    )
)
_LEAST = 16  # characters of a phrase that tells its place: a label of each document does not
_MOST = 256  # characters from one phrase to the next
_WINDOW = 16  # characters that say whether a phrase ends before them, where no sign does
_APART = 32  # characters between such places at the least; about three times as many on average
_ONE_IN_64 = np.uint64(1 << 58)  # of all hashes
_CHAINED = 4  # the beginning of a prompt is remembered at every so many phrases

_SETS, _WAYS = 1 << 17, 16  # of hashes that are remembered: 16 MiB

MIN_TOKENS = 64
"""Tokens of a text that is worth keeping, at the least."""


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A stretch of a prompt without anything known in it. phrases: where they begin and end. density: tokens
    of a character, about."""

    text: str
    phrases: Sequence[tuple[int, int]]
    density: float = 0.0

    @property
    def goes_on(self) -> bool:
        """Return whether something is said behind the last phrase."""
        return any(map(str.isalnum, self.text[self.phrases[-1][1] :]))


class Sightings:
    """The hashes of what prompts held, in this process only, by a key of its own. The oldest are forgotten.
    Not thread-safe."""

    def __init__(self, tokenizer: Any, most: int) -> None:
        """Begin without any. most: tokens of a text that is found; longer ones come in parts."""
        self._most, self._key = most, secrets.token_bytes(32)
        # A set has room for the latest hashes of those that fall into it.
        self._table = np.zeros((_SETS, _WAYS), dtype=np.uint64)
        self._next = np.zeros(_SETS, dtype=np.uint8)
        markup = sorted(control_tokens(tokenizer).values(), key=len, reverse=True)
        self._markup = re.compile("|".join(map(re.escape, markup)) or "(?!)")

    def note(self, plan: PromptPlan, held: int | None = None) -> list[str]:
        """Note a prompt. Returns what it has of earlier ones: texts that are not known, and that vLLM's
        prefix cache did not have for its beginning. What the prompt ends with, behind a text of its own, is
        left out: it is asked for, or says how to answer, and is read as the question then.

        held: how many tokens the cache had of those that are not known. None: what earlier prompts began
        with, as it has for those that are not blended.
        """
        stretches = [*self._stretches(plan, held or 0)]
        last = max((at for at, one in enumerate(stretches) if one.phrases), default=None)
        chain = [] if held is not None else self._chain(stretches)
        pairs = [self._pairs(stretch) for stretch in stretches]
        seen = self._seen([*chain, *(number for numbers in pairs for number in numbers)])
        begun = _CHAINED * [*seen[: len(chain)], False].index(False)  # phrases
        found, at = list[str](), len(chain)
        for place, (stretch, numbers) in enumerate(zip(stretches, pairs, strict=True)):
            again = seen[at : at + len(numbers)]
            again[:begun] = [False] * min(begun, len(again))
            at, begun = at + len(numbers), max(0, begun - len(stretch.phrases))
            for first, past in _runs(again):
                if place != last or first == 0 or past < len(again) or stretch.goes_on:
                    found += self._texts(stretch, stretch.phrases[first : past + 1])
        return list(dict.fromkeys(found))

    def _stretches(self, plan: PromptPlan, held: int) -> Iterator[_Stretch]:
        """Yield the prompt without control tokens, which no document has; what is known has no phrases."""
        for segment in plan.segments:
            if segment.chunk_key is not None:
                yield _Stretch(segment.chunk_key, ())
                continue
            density = len(segment.token_ids) / len(segment.text)
            for text in self._markup.split(segment.text[int(held / density) :]):
                yield _Stretch(text, [*_phrases(text)], density)
            held = max(0, held - len(segment.token_ids))

    def _pairs(self, stretch: _Stretch) -> list[bytes]:
        """Return the hashes of each two phrases, with what is between them."""
        return [
            blake2b(_bytes(stretch.text[begin:end]), key=self._key, digest_size=8).digest()
            for (begin, _), (_, end) in pairwise(stretch.phrases)
        ]

    def _chain(self, stretches: Iterable[_Stretch]) -> list[bytes]:
        """Return the hashes of the prompt's beginning, up to every few phrases."""
        so_far, numbers, count = blake2b(key=self._key, digest_size=8, person=b"beginning"), list[bytes](), 0
        for stretch in stretches:
            at = 0
            for _, end in stretch.phrases:
                so_far.update(_bytes(stretch.text[at:end]))
                at, count = end, count + 1
                if count % _CHAINED == 0:
                    numbers.append(so_far.copy().digest())
            so_far.update(_bytes(stretch.text[at:]))
        return numbers

    def _seen(self, hashes: Iterable[bytes]) -> list[bool]:
        """Return which of the hashes were seen before, and remember all."""
        numbers = np.frombuffer(b"".join(hashes), dtype=np.uint64)
        sets = (numbers % np.uint64(_SETS)).astype(np.intp)
        seen: list[bool] = (self._table[sets] == numbers[:, None]).any(axis=1).tolist()
        for number, place, known in zip(numbers, sets.tolist(), seen, strict=True):
            if not known:
                self._table[place, self._next[place]] = number
                self._next[place] = (self._next[place] + 1) % _WAYS
        return seen

    def _texts(self, stretch: _Stretch, phrases: Sequence[tuple[int, int]]) -> Iterator[str]:
        """Yield what these phrases begin and end, in parts of about the same length; nothing, if it is too
        short or cannot be parted."""
        begin, end = phrases[0][0], phrases[-1][1]
        tokens = (end - begin) * stretch.density
        if tokens < MIN_TOKENS:
            return
        size = (end - begin) / ceil(tokens / self._most)  # characters of a part
        for (_, until), (after, past) in pairwise((*phrases, (end, end + 2 * (end - begin)))):
            if (until + past) / 2 - begin > size:  # with the next phrase, it would be further from that size
                if until - begin < 2 * size:
                    yield stretch.text[begin:until].strip()
                begin = after


def _phrases(text: str) -> Iterator[tuple[int, int]]:
    """Yield where phrases begin and end, with nothing between them that is long."""
    before = 0
    for found in _PHRASE.finditer(text):
        begin, end = found.span()
        begin += len(found[0]) - len(found[0].lstrip())
        end -= len(found[0]) - len(found[0].rstrip())
        if end - begin >= _LEAST:
            yield from _unsigned(text, before, begin)
            yield from _unsigned(text, begin, end) if end - begin > _MOST else [(begin, end)]
            before = end
    yield from _unsigned(text, before, len(text))


def _unsigned(text: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield phrases of a stretch that bears no signs of them, if it is long."""
    if end - begin <= _MOST:
        return
    hashes = rolling_hashes(text[begin:end], _WINDOW)
    ends = np.flatnonzero(hashes < _ONE_IN_64) + (begin + _WINDOW)
    for place in (*ends.tolist(), end):
        if place - begin >= _APART:
            yield begin, place
            begin = place


def _runs(marks: Iterable[bool]) -> Iterator[tuple[int, int]]:
    """Yield where runs of true ``marks`` begin, and one behind their ends."""
    at = 0
    for mark, run in groupby(marks):
        length = sum(1 for _ in run)
        if mark:
            yield at, at + length
        at += length


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
