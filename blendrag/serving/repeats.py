"""Texts of prompts that come again, or are said to be documents, and that nobody has ingested: kept as any,
within a budget."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from blendrag.errors import BlendragError
from blendrag.prompt import PromptPlan, Sightings, encode_document
from blendrag.serving.owners import REPEATED, owner_of, repeat_of
from blendrag.serving.texts import Texts
from blendrag.store.catalogue import Kept

OWNERS = owner_of(REPEATED, "")
"""The beginning of their owners' names."""

_LEAST_TOKENS = 64  # of a text that a client has marked
_MOST_TOKENS = 1 << 15
_MOST_PROMPTS = 32  # that wait to be read; others are not
_MOST_WAITING = 8192  # tokens that wait to be prefilled: what comes beyond is kept when it comes again
_REUSED = 0.75  # share of the budget that texts cannot take which were not reused yet

_log = logging.getLogger(__name__)


class Repeats:
    """The texts that prompts hold again and again. Thread-safe.

    A prompt is read behind its answer, in a thread. What an earlier one held, too, is prefilled beside
    others, and is a text like any from then on, until its room is needed.
    """

    def __init__(self, texts: Texts, tokenizer: Any, budget: int, most: int) -> None:
        """Begin with what is kept, and nothing seen. budget: bytes of KV. most: tokens of a text."""
        self._texts, self._budget = texts, budget
        identity = texts.catalogue.identity
        self._token_bytes = 8 * identity.num_layers * identity.num_kv_heads * identity.head_size  # at most
        self._tokenizer, self._sightings = tokenizer, Sightings(tokenizer, most)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="blendrag-repeats")
        self._room = threading.BoundedSemaphore(_MOST_PROMPTS)

    def answered(self, plan: PromptPlan, held: int | None, marked: Sequence[str] = ()) -> None:
        """Have a prompt read that was answered. Returns at once. held: as :meth:`Sightings.note` has it.
        marked: texts that its client has said to be documents, which are kept at once."""
        if self._room.acquire(blocking=False):
            with contextlib.suppress(RuntimeError):  # closed
                work = self._thread.submit(self._read, plan, held, marked)
                work.add_done_callback(lambda _: self._room.release())

    def wait(self) -> None:
        """Wait until the prompts so far are read."""
        self._thread.submit(int).result()

    def close(self) -> None:
        """Read no more prompts; the one at hand is waited for."""
        self._thread.shutdown(cancel_futures=True)

    def _read(self, plan: PromptPlan, held: int | None, marked: Sequence[str]) -> None:
        try:
            found = [text for text in map(str.strip, marked) if self._is_document(text)]
            if found := [*found, *self._sightings.note(plan, held)]:
                self._keep(found)
        except BlendragError as error:  # nobody asked for it: a full disk, or an engine that has ended
            _log.info("what prompts repeat is not kept: %s", error)
        except Exception:
            _log.exception("what prompts repeat is not kept")

    def _is_document(self, text: str) -> bool:
        """Return whether a marked text is long enough to be one, and no longer than a prompt may be."""
        return len(text) >= _LEAST_TOKENS and (
            _LEAST_TOKENS <= len(encode_document(self._tokenizer, text)) <= _MOST_TOKENS
        )

    def _keep(self, found: Iterable[str]) -> None:
        texts, catalogue = self._texts, self._texts.catalogue
        new = {repeat_of(text): [text] for text in found}
        with texts.changing.mine():
            waiting = [one for one in catalogue.kept(OWNERS) if one.state == "pending"]
            if sum(one.tokens for one in waiting) > _MOST_WAITING:
                texts.repair([one.key for one in waiting])  # those of a failed prefill, among them
                return
            texts.register(new)
            kept = catalogue.kept(OWNERS)
            leaving = self._leaving(kept)
            texts.release(leaving)
        staying = new.keys() - leaving
        texts.repair([one.key for one in kept if one.owner in staying and one.state == "pending"])

    def _leaving(self, kept: Sequence[Kept]) -> set[str]:
        """Return the owners that leave, of texts in the order of :meth:`Catalogue.kept`, so that the rest is
        within the budget: those whose KV has left already, and those that were not used for longest."""
        each = max((one.bytes / one.tokens for one in kept if one.bytes), default=self._token_bytes)
        left = float(self._budget)

        def fits(one: Kept, reserve: float) -> bool:
            nonlocal left
            size = one.bytes or one.tokens * each
            if one.state == "evicted" or size > left - reserve:
                return False
            left -= size
            return True

        others = [one for one in kept if not (one.uses and fits(one, (1 - _REUSED) * self._budget))]
        return {one.owner for one in others if not fits(one, 0)}


def forget(texts: Texts) -> None:
    """Forget what an earlier process has kept."""
    texts.release(texts.catalogue.owners(OWNERS))
