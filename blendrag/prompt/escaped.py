"""Known texts that a prompt holds only in escaped form, and what its author can do about it.

Two slips do this. A list of documents is put into a prompt without joining their texts, so that Python (or
JSON) writes it, ``\\n`` for each new line; or a template language made for web pages writes ``&amp;`` for
``&``. So do chat templates that write a tool's answer as JSON. The model reads such a prompt well enough, but
the text that was ingested is not in it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from blendrag.errors import BlendragWarning
from blendrag.prompt.recognise import Match, Recogniser

How = Literal["repr", "html", "template"]

# Every escape of Python's ``repr``; the double quote is JSON's. No code point above the last.
_REPR = re.compile(
    r"\\(?:([\\'\"nrt])|x([0-9a-f]{2})|u([0-9a-f]{4})|U(000[0-9a-f]{5}|0010[0-9a-f]{4}))", re.ASCII
)
_REPR_SIGNS = {"n": "\n", "r": "\r", "t": "\t"}
# The escapes of html.escape, markupsafe and mustache. Not html.unescape: it raises on &#999...9; of any
# length.
_HTML = re.compile(r"&(?:amp|lt|gt|quot|#39|#x27|#34);")
_HTML_SIGNS = {
    "&amp;": "&",
    "&lt;": "<",
    "&gt;": ">",
    "&quot;": '"',
    "&#39;": "'",
    "&#x27;": "'",
    "&#34;": '"',
}

_REMEDIES: dict[How, str] = {
    "repr": "in the prompt only as part of a list or object that was turned into a string: join the "
    "documents' texts before they go into the prompt (LangChain: `retriever | format_docs`; LlamaIndex: "
    'response_mode="compact")',
    "html": "in the prompt only HTML-escaped: use three braces, `{{{context}}}`, or an f-string template",
    "template": "in the prompt only as the model's chat template escapes such messages: put documents into a "
    "user's message, or have a chat template that writes the messages of tools as they are",
}

_warned: set[How] = set()


@dataclass(frozen=True, slots=True)
class EscapedDocument:
    """A known text, of ``tokens`` tokens, of which a prompt has more in escaped form than as it is."""

    source: str | None
    key: str
    how: How
    tokens: int

    @property
    def remedy(self) -> str:
        """Return where the text is, and what to do; it is read after "its text is"."""
        return _REMEDIES[self.how]


def find_escaped(text: str, recogniser: Recogniser, said: str = "") -> list[EscapedDocument]:
    """Return known texts that are in ``text`` after unescaping it, and not (or less of them) before.
    ``said``: what the chat template made ``text`` of.

    A text without escapes is only searched for their marks, which takes microseconds.
    """
    found: dict[str, EscapedDocument] = {}
    for how, unescaped in _unescaped(text):
        hidden = recogniser.find(unescaped)
        plain = _most_tokens(recogniser.find(text)) if hidden else {}
        for match in hidden:
            if match.tokens > plain.get(match.key, 0):
                tokens = len(match.known.token_ids)
                by: How = "template" if match.known.text in said else how
                found.setdefault(match.key, EscapedDocument(match.known.source, match.key, by, tokens))
    return list(found.values())


def warn_once(documents: Iterable[EscapedDocument]) -> None:
    """Give one BlendragWarning for each kind of escape in the life of the process."""
    for document in documents:
        if document.how not in _warned:
            _warned.add(document.how)
            message = f"{document.source or document.key} was not recognised: its text is {document.remedy}"
            warnings.warn(message, BlendragWarning, stacklevel=2)


def _unescaped(text: str) -> Iterable[tuple[How, str]]:
    """Yield ``text`` unescaped in each of the ways of which it bears marks."""
    ways: tuple[tuple[How, str, re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
        ("repr", "\\", _REPR, _repr_sign),
        ("html", "&", _HTML, lambda escape: _HTML_SIGNS[escape[0]]),
    )
    for how, mark, escapes, sign in ways:
        if mark in text and escapes.search(text):
            yield how, escapes.sub(sign, text)


def _repr_sign(escape: re.Match[str]) -> str:
    sign = escape[1]
    return _REPR_SIGNS.get(sign, sign) if sign else chr(int(escape[escape.lastindex or 0], 16))


def _most_tokens(matches: Iterable[Match]) -> dict[str, int]:
    most: dict[str, int] = {}
    for match in matches:
        most[match.key] = max(most.get(match.key, 0), match.tokens)
    return most
