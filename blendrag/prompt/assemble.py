"""The making of a prompt from retrieved chunks, for callers that bring no framework."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from blendrag.errors import ModelError
from blendrag.prompt.plan import DocumentNote, PromptPlan
from blendrag.prompt.planner import lay_out
from blendrag.prompt.recognise import KnownText, Match
from blendrag.prompt.template import Messages, passed_over, render_parts


def assemble(
    tokenizer: Any,
    messages: Messages,
    *,
    documents: Sequence[KnownText],
    template_options: Mapping[str, Any] | None = None,
) -> PromptPlan:
    """Render ``messages``, the last of which holds the documents; see :func:`turn_of`.
    ``template_options`` as in ``render_chat``.

    Documents are spliced in with their stored ids; all other contents are encoded without control
    tokens, so only the template can write those. Raises ModelError if the model has no chat template or
    its template refuses the messages.
    """
    parts, last = render_parts(tokenizer, messages, **(template_options or {})), len(messages) - 1
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


def turn_of(
    tokenizer: Any,
    system_prompt: str,
    stuffed: str,
    separator: str,
    history: Messages = (),
    /,
    **options: Any,
) -> list[Mapping[str, Any]]:
    """Return system prompt, ``history`` and a user message that says ``stuffed``: documents, and a question.
    Where the template takes no system message, or passes over it, the user says the system prompt first.
    ``options`` as in ``render_chat``."""
    user = {"role": "user", "content": stuffed}
    if system_prompt:
        system = {"role": "system", "content": system_prompt}
        with contextlib.suppress(ModelError):  # any other trouble returns when all is rendered
            if not passed_over(tokenizer, [system, {**user, "content": "?"}], **options):
                return [system, *history, user]
        user["content"] = f"{system_prompt}{separator}{stuffed}"
    return [*history, user]


def _locate(content: str, documents: Sequence[KnownText]) -> Iterator[Match]:
    """Yield where each document is in ``content``, except one that the template has changed."""
    at = 0
    for document in documents:
        start = content.find(document.text, at)
        if start >= 0:
            at = start + len(document.text)
            yield Match(start, at, len(document.token_ids), document)
