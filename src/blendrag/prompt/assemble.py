"""Put a prompt together from retrieved chunks, for callers that bring no framework."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from blendrag.errors import ModelError
from blendrag.prompt.plan import DocumentNote, PromptPlan, Segment
from blendrag.prompt.planner import found_note, give_up, is_exact
from blendrag.prompt.recognise import KnownText, Match
from blendrag.prompt.template import Message, Part, encode_document, encode_markup, render_parts


def assemble(
    tokenizer: Any,
    *,
    system_prompt: str,
    documents: Sequence[KnownText],
    separator: str,
    question: str,
    history: Sequence[Message] = (),
) -> PromptPlan:
    """Render system prompt, ``history`` and one user message: the documents, then the question.

    Documents are spliced in with their stored ids; all other contents are encoded without control
    tokens, so only the template can write those. Raises ModelError if the model has no chat template or
    its template refuses the messages.
    """
    stuffed = separator.join([*(document.text for document in documents), question])
    parts, last = _render(tokenizer, system_prompt, history, stuffed, separator)

    segments: list[Segment] = []
    matches: list[Match] = []
    for part in parts:
        located = list(_locate(part.text, documents)) if part.message == last else []
        segments += _splice(tokenizer, part, located)
        matches += located
    lost = len(documents) - len(matches)
    notes = [found_note(match) for match in matches]
    if lost > 0:
        keys = {match.key for match in matches}
        notes += [_lost_note(document) for document in documents if document.key not in keys]
    plan = PromptPlan(tuple(segments), tuple(notes))
    if not matches or is_exact(plan, tokenizer):
        return plan
    return give_up(plan, tuple(segment for part in parts for segment in _splice(tokenizer, part, [])))


def _render(
    tokenizer: Any, system_prompt: str, history: Sequence[Message], stuffed: str, separator: str
) -> tuple[list[Part], int]:
    """The rendered parts, and the number of the message that holds the documents."""
    user = {"role": "user", "content": stuffed}
    if not system_prompt:
        return render_parts(tokenizer, [*history, user]), len(history)
    try:
        system = {"role": "system", "content": system_prompt}
        return render_parts(tokenizer, [system, *history, user]), len(history) + 1
    except ModelError:  # some templates know no system role
        user["content"] = f"{system_prompt}{separator}{stuffed}"
        return render_parts(tokenizer, [*history, user]), len(history)


def _locate(content: str, documents: Sequence[KnownText]) -> Iterator[Match]:
    """Where each document is in ``content``; one that the template has changed is not."""
    at = 0
    for document in documents:
        start = content.find(document.text, at)
        if start >= 0:
            at = start + len(document.text)
            yield Match(start, at, document.token_ids, document)


def _splice(tokenizer: Any, part: Part, matches: list[Match]) -> Iterator[Segment]:
    encode = encode_markup if part.message is None else encode_document
    at = 0
    for match in matches:
        if at < match.start:
            yield Segment(part.text[at : match.start], encode(tokenizer, part.text[at : match.start]))
        yield Segment(match.known.text, match.token_ids, match.key, match.known.source)
        at = match.end
    if at < len(part.text):
        yield Segment(part.text[at:], encode(tokenizer, part.text[at:]))


def _lost_note(document: KnownText) -> DocumentNote:
    reason = "the chat template changed its text"
    return DocumentNote(document.source, False, reason, len(document.token_ids), 0)
