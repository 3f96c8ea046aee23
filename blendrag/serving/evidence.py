"""The evidence of what was computed for a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from blendrag.engine.wire.report import PrefillFacts

Mode = Literal["exact", "mixed", "blended", "plain"]
Speculated = Literal["adopted", "discarded", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence(PrefillFacts):
    """The evidence of a prompt: which of its tokens were computed, in tokens, and why not fewer; and the
    worker's report, whose exact tokens are among the reused ones.

    mode: how the prompt was prefilled. exact: all of its documents' KV was to come from the tree of
    prefixes; mixed: that of its first ones did, and the rest was blended.
    reused: taken from the store, and moved at most by what tokens near them have moved; or, of blended
    documents, from vLLM's own prefix cache, behind an earlier prompt that began in the same way.
    fresh: computed because no KV was there to take (system prompt, separators, question, misses).
    prefix: all others that vLLM's prefix cache had.
    plain: why the prompt was prefilled without blending; None if it was blended.
    documents: one row per segment of the prompt, as ``explain()`` gives them.
    speculation: whether the answer had been begun before it was asked for (adopted); or one had, that nobody
    asked for then (discarded).
    resumed: why the engine failed in the middle of the answer, and how many of its tokens were given out by
    then, and prefilled behind the prompt by the next one. Of a resumed answer, all else is of its last part:
    those tokens are among the computed ones.
    """

    prompt: int
    mode: Mode = "plain"
    reused: int = 0
    fresh: int = 0
    prefix: int = 0
    plain: str | None = None
    documents: tuple[dict[str, Any], ...] = ()
    speculation: Speculated = "none"
    resumed: dict[str, int] = field(default_factory=dict)

    @property
    def computed(self) -> int:
        """The number of prompt tokens that the model computed in full."""
        return self.recomputed + self.fresh
