"""The making of a prompt from retrieved chunks, for callers that bring no framework."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from blendrag.errors import ModelError
from blendrag.prompt.plan import DocumentNote, PromptPlan
from blendrag.prompt.planner import lay_out
from blendrag.prompt.recognise import KnownText, Match
from blendrag.prompt.template import Messages, Part, render_parts


def assemble(
    tokenizer: Any,
    *,
    system_prompt: str,
    documents: Sequence[KnownText],
    separator: str,
    question: str,
    history: Messages = (),
    template_options: Mapping[str, Any] | None = None,
) -> PromptPlan:
    """Render system prompt, ``history`` and one user message: the documents, then the question.
    ``template_options`` as in ``render_chat``.

    Documents are spliced in with their stored ids; all other contents are encoded without control
    tokens, so only the template can write those. Raises ModelError if the model has no chat template or
    its template refuses the messages.
    """
    stuffed = separator.join([*(document.text for document in documents), question])
    options = template_options or {}
    parts, last = render_turn(tokenizer, system_prompt, history, stuffed, separator, **options)
    found = [list(_locate(part.text, documents)) if part.message == last else [] for part in parts]
    plan = lay_out(tokenizer, parts, found)

    located = {match.key for matches in found for match in matches}
    reason = "the chat template changed its text"
    changed = (
        DocumentNote(document.source, False, reason, len(document.token_ids), 0)
        for document in documents
        if document.key not in located
    )
    return PromptPlan(plan.segments, (*plan.notes, *changed))


def render_turn(
    tokenizer: Any, system_prompt: str, history: Messages, stuffed: str, separator: str, /, **options: Any
) -> tuple[list[Part], int]:
    """Return the rendered parts, and the number of the message that holds the documents."""
    user = {"role": "user", "content": stuffed}
    if system_prompt:
        messages = [{"role": "system", "content": system_prompt}, *history, user]
        with contextlib.suppress(ModelError):  # some templates refuse a system message, others pass over it
            parts = render_parts(tokenizer, messages, **options)
            if any(part.message == 0 for part in parts):
                return parts, len(history) + 1
        user["content"] = f"{system_prompt}{separator}{stuffed}"  # any other trouble returns below
    return render_parts(tokenizer, [*history, user], **options), len(history)


def _locate(content: str, documents: Sequence[KnownText]) -> Iterator[Match]:
    """Yield where each document is in ``content``, except one that the template has changed."""
    at = 0
    for document in documents:
        start = content.find(document.text, at)
        if start >= 0:
            at = start + len(document.text)
            yield Match(start, at, len(document.token_ids), document)
