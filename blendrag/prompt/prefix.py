"""Shared prefixes: the tokens that chunks can be prefilled behind, because their prompts begin with them.

A chunk that is prefilled alone takes its own first tokens for the beginning of the prompt, which models look
at all the time (attention sinks). Put behind others, it has false ones. Prefilled behind a prefix, it has
none.
"""

from __future__ import annotations

from datetime import datetime
from secrets import randbits
from typing import Any

from blendrag.prompt.assemble import turn_of
from blendrag.prompt.template import Part, encode_document, encode_markup, implied_bos, render_parts

# Templates that write today's date would make another prefix, and another index, every day.
_SOME_DAY = datetime(2024, 7, 26)
_CONTENT = "Yes."


def start_prefix(tokenizer: Any) -> tuple[int, ...]:
    """Return the token ids that every chat begins with, whatever its messages say: the template's markup
    before the first of them. Without a chat template: the model's BOS token, if it has one."""
    if not getattr(tokenizer, "chat_template", None):
        return encode_markup(tokenizer, implied_bos(tokenizer) or "")
    parts = _parts(tokenizer, _CONTENT, _CONTENT, "")
    return encode_markup(tokenizer, parts[0].text) if parts[0].message is None else ()


def shared_prefix(tokenizer: Any, system_prompt: str, separator: str) -> tuple[int, ...]:
    """Return the token ids that stand before the first document where ``assemble`` has put it in a chat.

    Without a chat template: those of the system prompt and separator as plain text. A date in
    the template is that of an arbitrary day.
    """
    if not getattr(tokenizer, "chat_template", None):
        text = f"{system_prompt}{separator}" if system_prompt else ""
        return encode_markup(tokenizer, (implied_bos(tokenizer) or "") + text)
    document = f"[{randbits(64)}]"  # occurs in no system prompt, and no template changes it
    parts = _parts(tokenizer, system_prompt, document, separator)
    ids: list[int] = []
    for part in parts:
        encode = encode_markup if part.message is None else encode_document
        before, found, _ = part.text.partition(document)
        ids += encode(tokenizer, before) if before else ()
        if found:
            break
    return tuple(ids)


def _parts(tokenizer: Any, system_prompt: str, stuffed: str, separator: str) -> list[Part]:
    day: dict[str, Any] = {"strftime_now": _SOME_DAY.strftime}
    return render_parts(tokenizer, turn_of(tokenizer, system_prompt, stuffed, separator, **day), **day)
