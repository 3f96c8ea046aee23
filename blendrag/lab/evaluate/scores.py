"""Scores of one answer: against the answers that are right, or against another answer.

Text is compared as SQuAD does it (lower case, no punctuation, no articles), Chinese and Japanese character by
character, as MLQA does it.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

# Kana, and Han with its extensions.
_UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_ARTICLES = {"a", "an", "the"}


def f1(text: str, answers: Sequence[str]) -> float:
    """Return the overlap of words, 0 to 1, with the one of ``answers`` it is largest with. Two blank texts
    are equal."""
    return max(_f1(_words(text), _words(answer)) for answer in answers)


def same_text(text: str, other: str) -> bool:
    """Return whether nothing differs but case, punctuation, articles and spaces."""
    return _words(text) == _words(other)


def _f1(words: list[str], answer: list[str]) -> float:
    if not words or not answer:
        return float(words == answer)
    shared = (Counter(words) & Counter(answer)).total()
    return 2 * shared / (len(words) + len(answer))


def _words(text: str) -> list[str]:
    kept = "".join(sign for sign in text.lower() if not _is_punctuation(sign))
    return [word for word in _UNSPACED.sub(r" \g<0> ", kept).split() if word not in _ARTICLES]


def _is_punctuation(sign: str) -> bool:
    return sign in string.punctuation or unicodedata.category(sign).startswith("P")
