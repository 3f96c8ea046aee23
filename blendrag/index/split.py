"""Splitting documents into chunks measured in the model's own tokens."""

from __future__ import annotations

import copy
import re
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, NamedTuple
from unicodedata import category, combining

from blendrag.errors import ConfigError, ModelNotSupportedError
from blendrag.prompt.template import encode_document

# Where a text is cut, best place first: paragraphs and lines (headings stay with what follows them),
# sentences (Chinese and Japanese ones end without a space, but with their quotes), words, and, without blanks
# there, behind a sign: a cut within a number of compact JSON would make two others.
_MARK = (
    r"(?:(?:#{1,6}|={1,6}|\*{2,8}|h[1-6]\.) |"  # Markdown; AsciiDoc, Typst, wikis; Org; Textile
    r"\\(?:chapter|(?:sub)*section)\b|\.S[HS] )"  # LaTeX; man
)
_HEADING = rf"{_MARK}[^\n]*\n"
_SIGNS = r"=~^\"'*+.#:_-"  # under a heading of reStructuredText or Markdown, and perhaps over it
_UNDERLINED = rf"(?:([{_SIGNS}])\1{{2,}}\n)?[^\n]+\n[{_SIGNS}]{{3,}}[ \t]*\n"
_END, _QUOTE = ".!?…।॥؟۔։።။។།", "\"'”’»)"  # in front of a blank; the last are of Burmese, Khmer and Tibetan
_FULL, _CLOSE = "。！？．｡", "」』”’）》】〉"
_POINT = "[\\dA-Za-zＡ-Ｚａ-ｚ]．"  # as in ３．１４, １．概要, Ｎｏ．３
_BEHIND_SIGN = re.compile(
    rf"(?<=[,;|)\]}}>，、；：])(?![,;|)\]}}>，、；：{_CLOSE}]|(?<=\d,)\d{{3}}(?!\d))"  # nor in 1,000
)
_SEPARATORS = [
    re.compile(rf"(?:\n\s*\n|\n(?={_HEADING}\s*\n))(?:(?:{_HEADING}|{_UNDERLINED})\s*\n){{0,4}}"),
    # Lines that all begin so are a list or a comment.
    re.compile(rf"(?<!\n)\n(?!\s*\n)(?:(?:{_HEADING}){{1,4}}(?!{_MARK}))?"),
    re.compile(
        rf"(?:(?<=[{_END}])|(?<=[{_END}][{_QUOTE}]))\s|"
        rf"(?:(?<=[{_FULL}])(?<!{_POINT})|(?<=[{_FULL}][{_CLOSE}]))(?![{_FULL}{_CLOSE}])"
    ),
    re.compile(r"\s"),
    _BEHIND_SIGN,
]
_WORD_START = re.compile(r"(?<!\S)\S")
_NOT_SPACE = re.compile(r"\S")

_MIN_TOKENS = 8  # a character takes up to five tokens where a vocabulary falls back to bytes
_BLOCK_CHARS_PER_TOKEN = 32  # a block is encoded at once, for several pieces


class TextChunk(NamedTuple):
    """A chunk: its text, an exact part of its document, and its tokens as ``encode_document`` gives them."""

    text: str
    token_ids: tuple[int, ...]


def _letter_start(text: str, at: int, behind: int) -> int:
    """Return the last place up to ``at`` where a letter begins, with its marks and what is joined to it, else
    ``at``."""
    return next(
        (place for place in range(at, behind, -1) if not _is_joined(text[place - 1], text[place])), at
    )


def _is_joined(before: str, here: str) -> bool:
    joining = before == _JOINER or combining(before) == _VIRAMA or category(here)[0] == "M"
    return joining or _JOINED.match(here) is not None


_JOINER, _VIRAMA = "\u200d", 9
# A joiner, AM of Thai and Lao, vowels and finals of Hangul; of emoji flags' letters, colours and tags.
_JOINED = re.compile(
    "[\u200d\u0e33\u0eb3\u1160-\u11ff\U0001f1e6-\U0001f1ff\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f]"
)


class Splitter:
    """A splitter of texts into pieces of at most ``chunk_tokens`` tokens.

    A full piece ends at the last paragraph in its second half, else at the last line, sentence, word or sign
    there, else at any letter. Nothing but white space around pieces is lost. Neighbours share about
    ``overlap`` tokens. Raises ConfigError for sizes that do not go together.
    """

    def __init__(self, tokenizer: Any, *, chunk_tokens: int = 512, overlap: int = 0) -> None:
        if chunk_tokens < _MIN_TOKENS:
            raise ConfigError(f"chunk_tokens {chunk_tokens} has to be at least {_MIN_TOKENS}")
        if not 0 <= overlap < chunk_tokens // 2:
            raise ConfigError(f"chunk_overlap {overlap} is not less than half of chunk_tokens {chunk_tokens}")
        if not tokenizer.is_fast:
            raise ModelNotSupportedError(
                "the model's tokenizer does not tell where its tokens begin in a text"
            )
        self._tokenizer = tokenizer
        self._limit = chunk_tokens
        self._overlap = overlap
        # An own copy: these options are state of the object, which other threads use at the same time.
        self._backend = copy.deepcopy(tokenizer.backend_tokenizer)
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()

    def split(self, text: str) -> list[TextChunk]:
        """Return the pieces of one document, in order; none when it holds only white space."""
        return list(self._pieces(text))

    def _pieces(self, text: str) -> Iterator[TextChunk]:
        block: list[int] = []
        start = 0
        while found := _NOT_SPACE.search(text, start):
            start = found.start()
            first = bisect_left(block, start)
            if first < len(block) and block[first] > start:
                first -= 1  # this token begins with the white space before it
            if not block or (len(block) - first <= self._limit and block[-1] < len(text)):
                block, first = self._token_starts(text, start), 0
            piece, end = self._piece(text, start, block[first : first + self._limit + 1])
            if piece.token_ids:  # a vocabulary may lack a control character, and that can be all there is
                yield piece
            start = end if end == len(text) else self._with_overlap(text, start, end, block)

    def _piece(self, text: str, start: int, starts: list[int]) -> tuple[TextChunk, int]:
        """Return the piece at ``start``, and its end. ``starts``: of its tokens and the next one."""
        budget = self._limit
        while True:
            end = self._end(text, start, starts, budget)
            piece = text[start:end].rstrip()
            token_ids = encode_document(self._tokenizer, piece)
            if len(token_ids) <= self._limit:
                return TextChunk(piece, token_ids), end
            # Alone, a text can take more tokens than it takes between others: try a shorter one.
            budget = min(budget - 1, budget * self._limit // len(token_ids))

    def _end(self, text: str, start: int, starts: list[int], budget: int) -> int:
        """Return where a piece of about ``budget`` tokens, at most, best ends."""
        if starts[-1] == len(text) and len(starts) - 1 <= budget:
            return len(text)
        # A character of several tokens is one position to all of them, so that no cut falls inside it.
        first, last = max(starts[budget // 2], start + 1), max(starts[budget], start + 1)
        for separator in _SEPARATORS:
            found = (match.start() for match in separator.finditer(text, start, last + 2))
            ends = [end for end in found if first <= end <= last]
            if ends:
                return ends[-1]
        return _letter_start(text, last, first)

    def _with_overlap(self, text: str, start: int, end: int, block: list[int]) -> int:
        """Return where the next piece starts: at a word, if there is one among the tokens to be repeated."""
        if not self._overlap:
            return end
        repeated = _letter_start(text, block[max(bisect_left(block, end) - self._overlap, 0)], start)
        word = _WORD_START.search(text, repeated, end) or _BEHIND_SIGN.search(text, repeated, end)
        if word is None and text[end].isspace():
            return end  # they are the end of a long word, which means nothing alone
        return max(word.start() if word else repeated, start + 1)

    def _token_starts(self, text: str, start: int) -> list[int]:
        """Return where the tokens from ``start`` on begin: more than a piece holds, unless the text ends.

        The length of the text stands at the end of the list when its last token is in it.
        """
        width = self._limit * _BLOCK_CHARS_PER_TOKEN
        while True:
            encoding = self._backend.encode(text[start : start + width], add_special_tokens=False)
            starts = [start + offset for offset, _ in encoding.offsets]
            if start + width >= len(text):
                return [*starts, len(text)]
            if len(starts) > self._limit:
                return starts
            width *= 2
