"""Find the ingested texts that occur in a prompt.

A text is known by its anchor, its first 32 characters. Every window of 32 characters of the prompt is
looked up among the anchors (a dictionary: nothing to rebuild when texts are added), and a hit is
verified by comparing text. Texts that share an anchor, such as pages with the same heading, are kept
in order, so that the longest match among them is found by bisection.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from blendrag.prompt.template import decode

ANCHOR = 32
SHORT_ANCHOR = 16  # for texts shorter than ANCHOR; texts shorter than this are found through hints only


@dataclass(frozen=True, slots=True)
class KnownText:
    """An ingested chunk: its text, the ids its KV was computed from, its key in the store."""

    text: str
    token_ids: tuple[int, ...]
    key: str
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Match:
    """``text[start:end]`` of the prompt is what ``token_ids``, all or the first of ``known``'s, decode to."""

    start: int
    end: int
    token_ids: tuple[int, ...]
    known: KnownText

    @property
    def key(self) -> str:
        return self.known.key

    @property
    def whole(self) -> bool:
        return len(self.token_ids) == len(self.known.token_ids)


class Recogniser:
    """The texts of an index, to be found in prompts. Safe to use from several threads.

    A text that occurs only in part is matched by its longest prefix of at least ``min_tokens`` tokens
    (KV is causal, so a prefix of a chunk's KV is the KV of its prefix).
    """

    def __init__(self, tokenizer: Any, *, min_tokens: int = 32) -> None:
        self._tokenizer = tokenizer
        self._min_tokens = min_tokens
        self._lock = threading.RLock()
        self._by_key: dict[str, KnownText] = {}
        self._by_text: dict[str, KnownText] = {}
        self._anchors: dict[str, list[str]] = {}  # anchor -> texts in order
        self._short: int = 0  # how many anchors are SHORT_ANCHOR long

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, key: str, text: str, token_ids: Iterable[int], source: str | None = None) -> None:
        """Make ``text`` known; a key that is known already is left as it is."""
        known = KnownText(text, tuple(token_ids), key, source)
        with self._lock:
            if key in self._by_key or not text or not known.token_ids:
                return
            self._by_key[key] = known
            if text in self._by_text:
                return
            self._by_text[text] = known
            anchor = _anchor(text)
            if anchor:
                insort(self._anchors.setdefault(anchor, []), text)
                self._short += len(anchor) == SHORT_ANCHOR

    def remove(self, key: str) -> None:
        """Forget a text; an unknown key is no error."""
        with self._lock:
            known = self._by_key.pop(key, None)
            if known is None or self._by_text.get(known.text) is not known:
                return
            twin = next((other for other in self._by_key.values() if other.text == known.text), None)
            if twin:
                self._by_text[known.text] = twin
                return
            del self._by_text[known.text]
            anchor = _anchor(known.text)
            if anchor:
                texts = self._anchors[anchor]
                del texts[bisect_left(texts, known.text)]
                self._short -= len(anchor) == SHORT_ANCHOR
                if not texts:
                    del self._anchors[anchor]

    def known(self, hint: str) -> KnownText | None:
        """The known text with this key, or this very text."""
        with self._lock:
            return self._by_key.get(hint) or self._by_text.get(hint)

    def find(self, text: str, hints: Iterable[str] = ()) -> list[Match]:
        """Known texts in ``text``: in order, without overlaps.

        Texts (or keys) given as ``hints`` are placed first; then the prompt is read from left to right,
        and of the known texts that begin at the same character the longest match is taken.
        """
        with self._lock:
            matches: list[Match] = []
            for hint in hints:
                for begin, end in _gaps(matches, len(text)):
                    matches += self._find_hint(hint, text, begin, end)
                matches.sort(key=lambda match: match.start)
            for begin, end in _gaps(matches, len(text)):
                matches += self._scan(text, begin, end)
            return sorted(matches, key=lambda match: match.start)

    def _find_hint(self, hint: str, text: str, begin: int, end: int) -> Iterator[Match]:
        known = self.known(hint)
        wanted = known.text if known else hint
        at = text.find(wanted, begin, end) if wanted else -1
        while at >= 0:
            stop = at + len(wanted)
            match = Match(at, stop, known.token_ids, known) if known else self._longest(text, at, stop)
            if match:
                yield match
            at = text.find(wanted, match.end if match else at + 1, end)

    def _scan(self, text: str, begin: int, end: int) -> Iterator[Match]:
        anchors = self._anchors
        starts = [at for at in range(begin, end - ANCHOR + 1) if text[at : at + ANCHOR] in anchors]
        if self._short:
            last = end - SHORT_ANCHOR + 1
            short = [at for at in range(begin, last) if text[at : at + SHORT_ANCHOR] in anchors]
            starts = sorted({*starts, *short})
        for start in starts:
            if start >= begin:
                match = self._longest(text, start, end)
                if match:
                    yield match
                    begin = match.end

    def _longest(self, text: str, start: int, end: int) -> Match | None:
        """The longest match that begins at ``start`` and does not pass ``end``."""
        best: Match | None = None
        for size in (ANCHOR, SHORT_ANCHOR):
            texts = self._anchors.get(text[start : min(start + size, end)], [])
            if texts:
                rest = text[start:end]
                for match in (self._whole(texts, rest, start), self._partial(texts, rest, start)):
                    if match and (best is None or match.end > best.end):
                        best = match
        return best

    def _whole(self, texts: list[str], rest: str, start: int) -> Match | None:
        # Whatever sorts just before `rest` either is a prefix of it, or bounds how long one can be.
        while True:
            at = bisect_right(texts, rest) - 1
            if at < 0:
                return None
            if rest.startswith(texts[at]):
                known = self._by_text[texts[at]]
                return Match(start, start + len(known.text), known.token_ids, known)
            rest = commonprefix([rest, texts[at]])

    def _partial(self, texts: list[str], rest: str, start: int) -> Match | None:
        at = bisect_right(texts, rest)
        shared, nearest = max((len(commonprefix([rest, text])), text) for text in texts[max(at - 1, 0) : at + 1])
        known = self._by_text[nearest]
        ids, length = self._cut(known, shared)
        if len(ids) < self._min_tokens or len(ids) == len(known.token_ids):
            return None
        return Match(start, start + length, ids, known)

    def _cut(self, known: KnownText, shared: int) -> tuple[tuple[int, ...], int]:
        """The most of the text's first ids that decode to a prefix of its first ``shared`` characters."""
        ids = known.token_ids
        if len(ids) <= self._min_tokens:
            return (), 0
        near = bisect_right(range(len(ids)), shared, key=lambda n: len(decode(self._tokenizer, ids[:n])))
        # A cut inside a character decodes to replacement marks, up to four tokens either way.
        for count in range(min(near + 4, len(ids)), max(near - 8, 0), -1):
            head = decode(self._tokenizer, ids[:count])
            if len(head) <= shared and known.text.startswith(head):
                return ids[:count], len(head)
        return (), 0


def _anchor(text: str) -> str | None:
    if len(text) >= ANCHOR:
        return text[:ANCHOR]
    return text[:SHORT_ANCHOR] if len(text) >= SHORT_ANCHOR else None


def _gaps(matches: Iterable[Match], length: int) -> list[tuple[int, int]]:
    """What ``matches`` (in order) leave of a text of ``length`` characters."""
    edges = [0, *(edge for match in matches for edge in (match.start, match.end)), length]
    return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]
