"""The cache salt of a prompt that continues an earlier one: a chat's next turn finds the last turn's KV.

A salt names all that blended KV depends on but its tokens (:meth:`Recipe.cache_salt`), which for selectors
that read the question is the text behind the last document. In a chat that text grows with every turn, and
documents join; yet the KV of the turns before stays right: it is the beginning of this prompt. So a prompt
takes over the salt of the earlier prompt that it continues, and only what is new is computed.

As long as the prefix cache holds that beginning, the same tokens under one salt have the same KV. What it has
dropped is blended again, for the question of the next prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import uuid4

import numpy as np
import xxhash

from blendrag.engine.wire.recipe import Recipe

_MOST = 1024  # prompts that are remembered, in about a kilobyte each


@dataclass(frozen=True, slots=True)
class _Turn:
    recipe: Recipe
    length: int  # tokens of its prompt
    salt: str


class PriorTurns:
    """The salts of one engine's latest blended prompts. Used by one thread.

    alone: whether the engine has no other client. Other clients cannot know for which question joining
    documents were repaired; if there are any, a prompt takes over a salt only where no document joins.
    """

    def __init__(self, most: int = _MOST, *, alone: bool = True) -> None:
        self._most, self._alone = most, alone
        self._turns: OrderedDict[tuple[str, bytes], _Turn] = OrderedDict()  # by namespace and token ids
        self._grown: OrderedDict[tuple[str, bytes], str] = OrderedDict()

    def salt(self, namespace: str, recipe: Recipe, token_ids: Sequence[int]) -> str:
        """Return the prompt's own salt, or that of the longest remembered prompt that it continues. Where KV
        is evicted, return a salt that no other prompt has: what is left of the KV is of use to no other
        prompt."""
        if recipe.options.kv_budget is not None:
            return f"{namespace}:{uuid4().hex}"
        ids, recipe = np.asarray(token_ids, "<i4"), recipe.untraced
        own = recipe.cache_salt(namespace, token_ids)
        salt = self._taken_over(namespace, recipe, ids, own) or own
        self._turns[namespace, _name(ids)] = _Turn(recipe, len(ids), salt)
        self._turns.move_to_end((namespace, _name(ids)))
        for remembered in (self._turns, self._grown):
            while len(remembered) > self._most:
                remembered.popitem(last=False)
        return salt

    def _taken_over(self, namespace: str, recipe: Recipe, ids: np.ndarray, own: str) -> str | None:
        lengths = {turn.length for turn in self._turns.values() if _goes_on(recipe, turn)}
        for length in sorted(lengths, reverse=True):
            turn = self._turns.get((namespace, _name(ids[:length])))
            if turn is None or not _goes_on(recipe, turn):
                continue
            self._turns.move_to_end((namespace, _name(ids[:length])))
            new = recipe.spans[len(turn.recipe.spans) :]
            if not new:
                return turn.salt
            if not self._alone:
                continue
            # Under one salt, the same tokens must have the same KV. Joining documents are repaired for one
            # question, from one set of chunks.
            joined = turn.salt, _name(ids[: new[0][1]])
            if self._grown.setdefault(joined, own) == own:
                return turn.salt
        return None


def _goes_on(recipe: Recipe, turn: _Turn) -> bool:
    """Return whether a prompt may begin with all of the turn's prompt: blended alike, with other documents
    only behind it."""
    count = len(turn.recipe.spans)
    return (
        recipe.spans[:count] == turn.recipe.spans
        and (recipe.store, recipe.options) == (turn.recipe.store, turn.recipe.options)
        and all(start >= turn.length for _, start, _ in recipe.spans[count:])
    )


def _name(ids: np.ndarray) -> bytes:
    return xxhash.xxh3_128_digest(ids.tobytes())
