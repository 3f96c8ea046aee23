"""The search for ingested texts that occur in a prompt, whole or by their beginning."""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from blendrag.prompt.anchors import Anchors
from blendrag.prompt.template import changes_letters, decode

ANCHOR = 32
SHORT_ANCHOR = 16  # for texts shorter than ANCHOR; still shorter ones are found through hints only
_WINDOW = 64  # tokens


@dataclass(frozen=True, slots=True)
class KnownText:
    """An ingested chunk: its text, the ids its KV was computed from, its key in the store."""

    text: str
    token_ids: Sequence[int]
    key: str
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Match:
    """A match: the first ``tokens`` of ``known``, or all, decode to ``text[start:end]`` of a prompt."""

    start: int
    end: int
    tokens: int
    known: KnownText

    @property
    def key(self) -> str:
        return self.known.key

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self.known.token_ids[: self.tokens])

    @property
    def whole(self) -> bool:
        return self.tokens == len(self.known.token_ids)


class Recogniser:
    """The texts of an index, which it finds in prompts. Safe to use from several threads.

    A text that occurs only in part is matched by its longest prefix of at least ``min_tokens`` tokens:
    KV is causal, so the first rows of a chunk's KV are the KV of its prefix.
    """

    def __init__(self, tokenizer: Any, *, min_tokens: int = 32) -> None:
        self._tokenizer = tokenizer
        self._min_tokens = min_tokens
        self._lock = threading.RLock()
        self._by_key: dict[str, KnownText] = {}
        self._by_text: dict[str, list[str]] = {}  # text -> its keys; the first serves
        self._least: dict[str, int] = {}  # text -> the characters of the shortest prefix worth reusing
        self._reach = 0  # characters of the longest text so far
        self._anchors = (Anchors(ANCHOR), Anchors(SHORT_ANCHOR))

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, key: str, text: str, token_ids: Iterable[int], source: str | None = None) -> None:
        """Make ``text`` known; of a key that is known already, it says the source only."""
        # As a tuple, they would take several times the memory of the text; an array that is made from an
        # iterator is longer than it has to be.
        packed = array("i", tuple(token_ids))
        with self._lock:
            if key in self._by_key:
                self._by_key[key] = replace(self._by_key[key], source=source)
                return
            if not text or not packed:
                return
            known = self._by_key[key] = KnownText(text, packed, key, source)
            for spelling in self._spellings(known):
                if spelling not in self._by_text:
                    for anchors in self._anchors_of(spelling):
                        anchors.add(spelling)
                self._by_text.setdefault(spelling, []).append(key)
                self._reach = max(self._reach, len(spelling))

    def remove(self, key: str) -> None:
        """Forget a text; an unknown key is no error."""
        with self._lock:
            kept = self._by_key.pop(key, None)
            if kept is None:
                return
            for spelling in self._spellings(kept):
                same = self._by_text[spelling]
                same.remove(key)
                if not same:
                    del self._by_text[spelling]
                    self._least.pop(spelling, None)
                    for anchors in self._anchors_of(spelling):
                        anchors.remove(spelling)

    def known(self, hint: str) -> KnownText | None:
        """Return the known text with this key, or this very text."""
        with self._lock:
            if hint in self._by_key:
                return self._by_key[hint]
            return self._first(hint) if hint in self._by_text else None

    def find(self, text: str, hints: Iterable[str] = (), *, whole: bool = False) -> list[Match]:
        """Return the known texts in ``text``: in order, without overlaps. whole: none of which there is a
        part only, so that no part is measured.

        Texts (or keys) given as ``hints`` are placed first; then the prompt is read from left to right,
        and of the known texts that begin at the same character the longest match is taken; of a match that
        reaches into the next one, its beginning.
        """
        with self._lock:
            matches: list[Match] = []
            for hint in hints:
                found = [
                    match
                    for begin, end in gaps(matches, len(text))
                    for match in self._find_hint(hint, text, begin, end)
                ]
                matches = sorted(matches + found, key=lambda match: match.start)
            starts = sorted({start for anchors in self._anchors for start in anchors.starts(text)})
            if starts:
                for begin, end in gaps(matches, len(text)):
                    matches += self._scan(text, starts, begin, end, whole)
            return sorted(matches, key=lambda match: match.start)

    def _find_hint(self, hint: str, text: str, begin: int, end: int) -> Iterator[Match]:
        known = self.known(hint)
        wanted = known.text if known else hint
        at = text.find(wanted, begin, end) if wanted else -1
        while at >= 0:
            stop = at + len(wanted)
            match = Match(at, stop, len(known.token_ids), known) if known else self._longest(text, at, stop)
            if match:
                yield match
            at = text.find(wanted, match.end if match else at + 1, end)

    def _scan(self, text: str, starts: Sequence[int], begin: int, end: int, whole: bool) -> Iterator[Match]:
        """Yield the matches between ``begin`` and ``end``, in order. Where chunks overlap, as few of them are
        taken as reach as far: a match is followed by the one behind or inside it that ends last."""
        last, then = None, None
        for start in starts[bisect_left(starts, begin) : bisect_left(starts, end)]:
            if start < begin or not (match := self._longest(text, start, end, whole)):
                continue
            while last is not None and start > last.end:
                first, last, then = *self._before(last, then, whole), None
                yield from filter(None, [first])
            if last is None:
                last = match
            elif start < last.end and text[start : match.end] == text[last.start : last.end]:
                begin = last.end  # it repeats itself, so that every start in it may be one of it
            elif start == last.end or (match.whole and match.end > last.end):
                then = match if then is None or match.end >= then.end else then
        while last is not None:
            first, last, then = *self._before(last, then, whole), None
            yield from filter(None, [first])

    def _before(self, last: Match, then: Match | None, whole: bool) -> tuple[Match | None, Match | None]:
        """Return what is left of a match before the next one, if that is worth reusing, and the next one. Of
        two that exclude each other, the longer one is left."""
        if then is None or last.end <= then.start:
            return last, then
        if not whole:
            tokens, length = self._cut(last.known, then.start - last.start)
            if tokens >= self._min_tokens:
                return replace(last, end=last.start + length, tokens=tokens), then
        return (None, then) if then.end - then.start > last.end - last.start else (last, None)

    def _longest(self, text: str, start: int, end: int, whole: bool = False) -> Match | None:
        """Return the longest match that begins at ``start`` and does not pass ``end``."""
        rest = text[start : min(end, start + self._reach)]
        best: Match | None = None
        for anchors in self._anchors:
            texts = anchors.sharing(rest[: anchors.size])
            for look in (self._whole, self._partial)[: 1 if whole else 2] if texts else ():
                match = look(texts, rest, start)
                if match and (best is None or match.end > best.end):
                    best = match
        return best

    def _whole(self, texts: Sequence[str], rest: str, start: int) -> Match | None:
        """Return the longest of ``texts`` (sorted) with which ``rest`` begins."""
        # Whatever sorts just before `rest` either is a prefix of it, or bounds how long one can be.
        while at := bisect_right(texts, rest):
            nearest = texts[at - 1]
            if rest.startswith(nearest):
                known = self._first(nearest)
                return Match(start, start + len(nearest), len(known.token_ids), known)
            rest = rest[: _shared(rest, nearest)]
        return None

    def _partial(self, texts: Sequence[str], rest: str, start: int) -> Match | None:
        """Return the longest beginning of any of ``texts`` (sorted) with which ``rest`` begins."""
        at = bisect_right(texts, rest)
        shared, nearest = max((_shared(rest, text), text) for text in texts[max(at - 1, 0) : at + 1])
        if shared == len(nearest) or shared < self._least_of(nearest):
            return None
        known = self._first(nearest)
        tokens, length = self._cut(known, shared)
        return Match(start, start + length, tokens, known) if tokens >= self._min_tokens else None

    def _least_of(self, text: str) -> int:
        """Return how many characters ``text`` and a prompt must share. Remembered: a page that begins with a
        rule (``-----``) is looked at wherever a prompt has one."""
        if text not in self._least:
            head = decode(self._tokenizer, self._first(text).token_ids[: self._min_tokens])
            self._least[text] = len(head.rstrip("\ufffd"))  # without an unfinished character at the end
        return self._least[text]

    def _cut(self, known: KnownText, shared: int) -> tuple[int, int]:
        """Return how many of the text's first ids, at the most, decode to a prefix of its first ``shared``
        characters, and the length of that prefix."""
        ids, decoded = known.token_ids, partial(decode, self._tokenizer)
        if len(ids) <= self._min_tokens:
            return 0, 0
        # To decode all of the ids at every guess is slow: the last few are tried behind a fixed head.
        at, length = 0, len(decoded(ids[:_WINDOW]))
        while length <= shared and at + _WINDOW < len(ids):
            at += _WINDOW
            length += len(decoded(ids[at : at + _WINDOW]))
        for base in range(max(at - 8, 0), max(at - 16, -1), -1):
            head = decoded(ids[:base])
            if known.text.startswith(head):  # otherwise it ends inside a character
                break
        tail, room = ids[base : base + 2 * _WINDOW], shared - len(head)
        near = base + bisect_right(range(len(tail)), room, key=lambda count: len(decoded(tail[:count])))
        # A cut inside a character decodes to replacement marks: look a few tokens either way.
        for count in range(min(near + 4, len(ids)), max(near - 8, 0), -1):
            text = head + decoded(ids[base:count])
            if len(text) <= shared and known.text.startswith(text) and decoded(ids[:count]) == text:
                return count, len(text)
        return 0, 0

    def _first(self, text: str) -> KnownText:
        known = self._by_key[self._by_text[text][0]]
        return known if known.text == text else replace(known, text=text)

    def _spellings(self, known: KnownText) -> Iterable[str]:
        """Return a text, and what its tokens spell if that is another one: some tokenizers put letters in
        normal form, and a server reads prompts off their tokens."""
        changed = changes_letters(self._tokenizer, known.text)
        spelt = decode(self._tokenizer, known.token_ids) if changed else ""
        return filter(None, dict.fromkeys((known.text, spelt)))

    def _anchors_of(self, text: str) -> Sequence[Anchors]:
        """Return the index that ``text`` belongs in: one, or none if it is too short."""
        return [anchors for anchors in self._anchors if len(text) >= anchors.size][:1]


def _shared(one: str, other: str) -> int:
    """Return how many characters the two have in common at the start."""
    low, high, probe = 0, min(len(one), len(other)), 32
    while probe < high and one[low:probe] == other[low:probe]:
        low, probe = probe, 4 * probe
    high = min(high, probe)
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def gaps(matches: Iterable[Match], length: int) -> list[tuple[int, int]]:
    """Return what ``matches`` (in order) leave of a text of ``length`` characters."""
    edges = [0, *(edge for match in matches for edge in (match.start, match.end)), length]
    return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]
