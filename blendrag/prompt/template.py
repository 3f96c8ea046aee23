"""Chat templates and tokenisation, with the text of users kept apart from the template's markup.

A control token (``<|im_end|>``) has meaning only where the template wrote it. The same characters in
a question or a document are ordinary text: they are encoded as such, so that nobody can end a turn or
open a system message by writing one.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unicodedata import is_normalized
from weakref import WeakKeyDictionary

from jinja2 import TemplateError

from blendrag.errors import ModelError
from blendrag.text import encodable

# Tokenizers keep "split special tokens" as state of the object, so two threads must not use one at once.
_encoding = threading.Lock()
_spelled: WeakKeyDictionary[Any, dict[int, tuple[int, ...]]] = WeakKeyDictionary()

_SWITCH, _NEVER = re.compile("/(?:no_)?think"), re.compile("\0")  # a literal is found fast

Messages = Sequence[Mapping[str, Any]]  # role, content: those of chat completions


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a rendered chat: the template's own markup, or the content of message ``message``."""

    text: str
    message: int | None = None


def render_chat(tokenizer: Any, messages: Messages, /, **options: Any) -> str:
    """Return the text the model's chat template makes of ``messages``, up to where the answer begins.

    ``options`` go to the template, by any name. Raises ModelError if the model has no template or the
    template refuses the messages (some allow no system role, or want roles to alternate).
    """
    options = {"add_generation_prompt": True, **options}
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError("the model has no chat template: choose an instruction-tuned model")
    try:
        rendered = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    except TemplateError as error:
        raise ModelError(f"the model's chat template refuses these messages: {error}") from error
    except Exception as error:  # templates fail in their own ways at what they do not know
        reason = f"{type(error).__name__}: {error}"
        raise ModelError(f"the model's chat template fails at these messages: {reason}") from error
    assert isinstance(rendered, str)
    return encodable(rendered)  # a template, or a request's variable, may say anything


def render_parts(tokenizer: Any, messages: Messages, /, **options: Any) -> list[Part]:
    """Render as ``render_chat`` does, cut where the template's markup and the messages' contents meet.

    The template is rendered with sentinels in place of the contents. Where it changes a content (many
    strip it), that content is read off a rendering in which only it is real, so that what a content
    says can never be taken for markup.
    """
    contents = [message.get("content") or "" for message in messages]
    masked, marks, mark_of = _masked(tokenizer, messages)
    pieces = mark_of.split(render_chat(tokenizer, masked, **options))

    if _join(pieces, contents) != render_chat(tokenizer, messages, **options):
        template = _join(pieces, marks)
        for number, (message, mark) in enumerate(zip(messages, marks, strict=True)):
            before, _, after = template.partition(mark)
            shown = render_chat(tokenizer, [*masked[:number], message, *masked[number + 1 :]], **options)
            shown = mark_of.sub(lambda found: marks[int(found[1])], shown)
            fits = shown.startswith(before) and shown.endswith(after) and len(shown) >= len(before + after)
            if mark in template and fits:
                contents[number] = shown[len(before) : len(shown) - len(after)]

    parts = [
        Part(contents[int(piece)], int(piece)) if at % 2 else Part(piece) for at, piece in enumerate(pieces)
    ]
    return [part for part in parts if part.text]


def passed_over(tokenizer: Any, messages: Messages, /, **options: Any) -> int:
    """Return how many contents and calls of ``messages`` the model's chat template does not write: some pass
    over a system message that is not the first, roles that they do not know, what is said beside a call, or
    all calls but the first. Raises ModelError as ``render_chat`` does."""
    masked, marks, _ = _masked(tokenizer, messages)
    sought = [mark for one, mark in zip(masked, marks, strict=True) if mark in (one.get("content") or "")]
    for number, (one, mark) in enumerate(zip(list(masked), marks, strict=True)):
        if calls := one.get("tool_calls"):
            own = [f"{mark[:-1]}/{at}]" for at in range(len(calls))]
            masked[number] = {**one, "tool_calls": list(map(_marked_call, calls, own))}
            sought += own
    shown = render_chat(tokenizer, masked, **options)
    return sum(mark not in shown for mark in sought)


def _marked_call(call: Mapping[str, Any], mark: str) -> dict[str, Any]:
    return {**call, "function": {**call.get("function", {}), "arguments": {"mark": mark}}}


def _masked(tokenizer: Any, messages: Messages) -> tuple[list[Mapping[str, Any]], list[str], re.Pattern[str]]:
    """Return messages with a mark in place of each content, the marks, and what finds the number of one."""
    nonce = secrets.randbits(64)  # digits and signs only: the same in upper and lower case
    marks = [f"[{nonce}:{number}]" for number in range(len(messages))]
    # Some templates are told in a content whether the model thinks, and take that out of it.
    told = _SWITCH if "/no_think" in str(getattr(tokenizer, "chat_template", None)) else _NEVER
    masked = list(messages)
    for number, (message, mark) in enumerate(zip(messages, marks, strict=True)):
        content = message.get("content")
        # An empty content stays: templates ask whether there is one (a tool call comes without).
        if (
            isinstance(content, str)
            and content
            and (told.sub("", content).strip() or not told.search(content))
        ):
            masked[number] = {**message, "content": mark + "".join(dict.fromkeys(told.findall(content)))}
    return masked, marks, re.compile(rf"\[{nonce}:(\d+)\](?:{told.pattern})*")


def _join(pieces: Sequence[str], contents: Sequence[str]) -> str:
    return "".join(contents[int(piece)] if at % 2 else piece for at, piece in enumerate(pieces))


def encode_document(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Return the token ids of a document, question or other text of users: no control tokens."""
    with _encoding:
        spelled = _spelled.get(tokenizer)
        if spelled is None:
            spelled = _spelled[tokenizer] = _spell_control_tokens(tokenizer)
        ids = _encode(tokenizer, text, split_special_tokens=True)
    return tuple(piece for token in ids for piece in spelled.get(token, (token,)))


def encode_markup(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Return the token ids of template text: control tokens count; no BOS is added."""
    with _encoding:
        return tuple(_encode(tokenizer, text, split_special_tokens=False))


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Return the text of ``token_ids``, control tokens included, nothing tidied."""
    text = tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def changes_letters(tokenizer: Any, text: str) -> bool:
    """Return whether the tokenizer puts letters of ``text`` in another form, as Unicode's normal ones are."""
    normal = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    if normal is None or is_normalized("NFKC", text):  # what else it changes are blanks, which it gives back
        return False
    shown = normal.normalize_str(text).replace("\u2581", " ")  # SentencePiece's blank
    return bool(shown.strip() != text.strip())


def implied_bos(tokenizer: Any) -> str | None:
    """Return the text of the BOS token if the tokenizer itself puts one before plain text."""
    with _encoding:
        ids = tokenizer("", add_special_tokens=True)["input_ids"]
    puts_one = tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]
    return tokenizer.bos_token if puts_one else None


def _encode(tokenizer: Any, text: str, *, split_special_tokens: bool) -> list[int]:
    encoded = tokenizer(
        text, add_special_tokens=False, split_special_tokens=split_special_tokens, verbose=False
    )
    return encoded["input_ids"]


def _spell_control_tokens(tokenizer: Any) -> dict[int, tuple[int, ...]]:
    """Return, for each added token that ``split_special_tokens`` lets through, ids that spell it.

    That option covers tokens flagged as special only; ``<tool_call>`` and the like often are not.
    """
    return {
        token: tuple(
            _encode(tokenizer, text[:1], split_special_tokens=True)
            + _encode(tokenizer, text[1:], split_special_tokens=True)
        )
        for token, text in control_tokens(tokenizer).items()
    }


def control_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the texts of the tokens that are markup, by id: added ones with letters or behind ``<|``, not
    runs of blanks."""
    added = {token: one.content for token, one in tokenizer.added_tokens_decoder.items()}
    return {token: text for token, text in added.items() if any(map(str.isalpha, text)) or text[:2] == "<|"}
