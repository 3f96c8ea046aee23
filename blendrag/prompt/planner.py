"""The planning of a prompt that some framework has made: find what is known in it, splice stored ids in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from blendrag.prompt.escaped import find_escaped
from blendrag.prompt.plan import DocumentNote, PromptPlan, Segment, preview
from blendrag.prompt.recognise import Match, Recogniser
from blendrag.prompt.template import (
    Messages,
    Part,
    decode,
    encode_document,
    encode_markup,
    implied_bos,
    render_parts,
)

_ESCAPED = "its text is in the prompt escaped: in this form it is reused from the next prompt on"


def plan_prompt(
    text: str, tokenizer: Any, recogniser: Recogniser, *, hints: Iterable[str] = ()
) -> PromptPlan:
    """Cut rendered ``text`` at the known texts in it and tokenise every segment apart.

    Tokenised as a whole, a document's last token would merge with what follows it; apart, the stored
    ids fit exactly. ``hints`` are texts or keys of documents the caller knows to be in the prompt: they
    are placed first and reported on even if they cannot be reused. Control tokens in ``text`` count, as
    nobody can tell any more who wrote them: prefer ``plan_chat`` where there are messages. A BOS token
    is put first if the tokenizer would put one and the text does not begin with it.

    If the ids would not decode to ``text`` (some SentencePiece tokenizers cannot split freely), the plan
    is the text as one fresh segment, and the notes say so.
    """
    bos = implied_bos(tokenizer)
    parts = [Part(text)] if text else []
    if bos and not text.startswith(bos):
        parts.insert(0, Part(bos))
    return _planned(parts, tokenizer, recogniser, tuple(hints), chat=False)


def plan_chat(
    messages: Messages,
    tokenizer: Any,
    recogniser: Recogniser,
    hints: Iterable[str] = (),
    /,
    **template_options: Any,
) -> PromptPlan:
    """Plan the rendered ``messages`` as ``plan_prompt`` does, but only the template can write control tokens.

    The template decides about BOS. Raises ModelError if there is no template or it refuses the messages.
    """
    parts = render_parts(tokenizer, messages, **template_options)
    return _planned(parts, tokenizer, recogniser, tuple(hints), chat=True)


def lay_out(tokenizer: Any, parts: Sequence[Part], found: Sequence[Sequence[Match]]) -> PromptPlan:
    """Return the plan for ``parts``, with ``found[i]`` the matches in part ``i``; none reused if inexact."""
    spliced = _segments(tokenizer, parts, found)
    notes = tuple(_found_note(match) for matches in found for match in matches)
    if not notes or _decoded(tokenizer, spliced) == "".join(part.text for part in parts):
        return PromptPlan(spliced, notes)
    # A vocabulary may lack rare bytes. A loss that happens without splicing, too, is not splicing's fault.
    whole = _segments(tokenizer, parts, [[]] * len(parts))
    if _decoded(tokenizer, spliced) == _decoded(tokenizer, whole):
        return PromptPlan(spliced, notes)
    reason = "this tokenizer cannot tokenise the documents apart without changing the text"
    notes = tuple(DocumentNote(note.source, False, reason, note.tokens, 0) for note in notes)
    return PromptPlan(whole, notes)


def _segments(tokenizer: Any, parts: Sequence[Part], found: Sequence[Sequence[Match]]) -> tuple[Segment, ...]:
    return tuple(
        segment
        for part, matches in zip(parts, found, strict=True)
        for segment in _splice(tokenizer, part, matches)
    )


def _decoded(tokenizer: Any, segments: Iterable[Segment]) -> str:
    return decode(tokenizer, [token for segment in segments for token in segment.token_ids])


def _splice(tokenizer: Any, part: Part, matches: Sequence[Match]) -> Iterator[Segment]:
    encode = encode_markup if part.message is None else encode_document
    at = 0
    for match in matches:
        if at < match.start:
            glue = part.text[at : match.start]
            yield Segment(glue, encode(tokenizer, glue))
        text = part.text[match.start : match.end]
        yield Segment(text, match.token_ids, match.key, match.known.source)
        at = match.end
    if at < len(part.text):
        yield Segment(part.text[at:], encode(tokenizer, part.text[at:]))


def _found_note(match: Match) -> DocumentNote:
    tokens, reused = len(match.known.token_ids), match.tokens
    reason = "found" if match.whole else f"found in part: its first {reused} of {tokens} tokens"
    return DocumentNote(match.known.source, True, reason, tokens, reused)


def _planned(
    parts: Sequence[Part], tokenizer: Any, recogniser: Recogniser, hints: Sequence[str], *, chat: bool
) -> PromptPlan:
    """Return the plan of ``parts`` with the forms in which the prompt holds documents, and a note for each of
    them and for each hint of which nothing is reused. Markup of a chat is not looked at."""
    read = [part.message is not None or not chat for part in parts]
    found = [
        recogniser.find(part.text, hints) if looked else [] for part, looked in zip(parts, read, strict=True)
    ]
    plan = lay_out(tokenizer, parts, found)
    if len(plan.cached_segments) < len(plan.notes):
        return plan  # laid out without reuse: every document is noted already
    forms = [
        form
        for part, matches, looked in zip(parts, found, read, strict=True)
        if looked
        for form in find_escaped(part.text, recogniser, matches)
    ]
    escaped = {form.key: form for form in forms}
    missing = [
        DocumentNote(form.source, False, _ESCAPED, form.tokens, 0)
        for key, form in escaped.items()
        if key not in plan.cached_keys
    ]
    notes = [
        replace(note, reason=f"{note.reason}; {_ESCAPED}")
        if key in escaped and note.reused < note.tokens
        else note
        for note, key in zip(plan.notes, plan.cached_keys, strict=True)
    ]
    text, keys = plan.text, {*plan.cached_keys, *escaped}
    for hint in hints:
        known = recogniser.known(hint)
        tokens = len(known.token_ids if known else encode_document(tokenizer, hint))
        source = known.source if known else preview(hint)
        wanted = known.text if known else hint
        if (known and known.key in keys) or any(segment.text in wanted for segment in plan.cached_segments):
            continue
        if wanted not in text:
            reason = "its text is not in the prompt" if known else "not ingested, and not in the prompt"
        else:
            reason = "overlaps another document" if known else "not ingested"
        missing.append(DocumentNote(source, False, reason, tokens, 0))
    return PromptPlan(plan.segments, (*notes, *missing), tuple(forms))
