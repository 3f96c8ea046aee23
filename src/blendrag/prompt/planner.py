"""Plan a prompt that some framework has already put together: find what is known, splice its ids in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from blendrag.prompt.plan import DocumentNote, PromptPlan, Segment, preview
from blendrag.prompt.recognise import Match, Recogniser
from blendrag.prompt.template import decode, encode_document, encode_markup, implied_bos


def plan_prompt(
    text: str, tokenizer: Any, recogniser: Recogniser, *, hints: Iterable[str] = ()
) -> PromptPlan:
    """Cut ``text`` at the known texts in it and tokenise every segment apart.

    Tokenised as a whole, a document's last token would merge with what follows it; apart, the stored
    ids fit exactly. ``hints`` are texts or keys of documents the caller knows to be in the prompt: they
    are placed first and reported on even if they cannot be reused. A BOS token is put first if the
    tokenizer would put one and the text does not begin with it.

    If the ids would not decode to ``text`` (some SentencePiece tokenizers cannot split freely), the plan
    is the whole prompt as one fresh segment, and a note says so.
    """
    hints = tuple(hints)
    bos = implied_bos(tokenizer)
    start = (Segment(bos[0], (bos[1],)),) if bos and not text.startswith(bos[0]) else ()
    matches = recogniser.find(text, hints)
    segments = start + tuple(_segments(text, matches, tokenizer))
    notes = tuple(found_note(match) for match in matches)
    plan = PromptPlan(segments, notes + tuple(_missing(text, hints, matches, tokenizer, recogniser)))
    if not matches or is_exact(plan, tokenizer):
        return plan
    return give_up(plan, start + (Segment(text, encode_markup(tokenizer, text)),))


def found_note(match: Match) -> DocumentNote:
    tokens, reused = len(match.known.token_ids), len(match.token_ids)
    reason = "found" if match.whole else f"found in part: its first {reused} of {tokens} tokens"
    return DocumentNote(match.known.source, True, reason, tokens, reused)


def is_exact(plan: PromptPlan, tokenizer: Any) -> bool:
    return decode(tokenizer, plan.token_ids) == plan.text


def give_up(plan: PromptPlan, fresh: tuple[Segment, ...]) -> PromptPlan:
    """``fresh`` in place of the plan's segments, every document noted as not reused."""
    reason = "this tokenizer cannot tokenise the documents apart without changing the text"
    notes = (DocumentNote(note.source, False, reason, note.tokens, 0) for note in plan.notes)
    return PromptPlan(fresh, tuple(notes))


def _segments(text: str, matches: list[Match], tokenizer: Any) -> Iterator[Segment]:
    at = 0
    for match in matches:
        if at < match.start:
            glue = text[at : match.start]
            yield Segment(glue, encode_markup(tokenizer, glue))
        yield Segment(text[match.start : match.end], match.token_ids, match.key, match.known.source)
        at = match.end
    if at < len(text):
        yield Segment(text[at:], encode_markup(tokenizer, text[at:]))


def _missing(
    text: str, hints: tuple[str, ...], matches: list[Match], tokenizer: Any, recogniser: Recogniser
) -> Iterator[DocumentNote]:
    """A note for each hint of which nothing was found."""
    found = {match.key for match in matches}
    for hint in hints:
        known = recogniser.known(hint)
        if known and known.key not in found:
            yield DocumentNote(known.source, False, "its text is not in the prompt", len(known.token_ids), 0)
        elif not known:
            at = text.find(hint)
            if at < 0:
                yield DocumentNote(preview(hint), False, "not ingested, and not in the prompt", 0, 0)
            elif not any(at <= match.start and match.end <= at + len(hint) for match in matches):
                tokens = len(encode_document(tokenizer, hint))
                yield DocumentNote(preview(hint), False, "not ingested", tokens, 0)
