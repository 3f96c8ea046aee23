"""The evidence of what was computed for a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from blendrag.engine.client.generation import Delta
from blendrag.engine.recipe import Recipe
from blendrag.load.trace import Event
from blendrag.prompt import PromptPlan


@dataclass(frozen=True, slots=True)
class Evidence:
    """Which of the prompt's tokens were computed, in tokens, and why not fewer.

    reused: taken from the store as they are. recomputed: taken from the store and repaired.
    fresh: computed because no KV was there to take (system prompt, separators, question, misses).
    prefix: found in vLLM's own prefix cache, from an earlier prompt that began in the same way.
    plain: why the prompt was prefilled without blending; None if it was blended.
    documents: one row per segment of the prompt, as ``explain()`` gives them.
    ms: where the fused prefill spent its time: load, select, recompute.
    tiers: chunks loaded, by the tier they came from. decision: why the controller loaded these and no others.
    trace: if it was asked for, what was loaded and computed when (see ``load.trace``).
    """

    prompt: int
    reused: int = 0
    recomputed: int = 0
    fresh: int = 0
    prefix: int = 0
    plain: str | None = None
    missing: dict[str, str] = field(default_factory=dict)
    documents: tuple[dict[str, Any], ...] = ()
    ms: dict[str, float] = field(default_factory=dict)
    tiers: dict[str, int] = field(default_factory=dict)
    decision: str = ""
    trace: tuple[Event, ...] = ()

    @property
    def computed(self) -> int:
        """Prompt tokens the model computed in full."""
        return self.recomputed + self.fresh


def evidence_of(plan: PromptPlan, recipe: Recipe | None, plain: str | None, last: Delta) -> Evidence:
    """Put together what was planned and what the engine reported."""
    prompt = len(plan.token_ids)
    documents = tuple(plan.describe())
    report = last.report
    fallback = report and report.fallback
    if recipe is None or fallback:
        reason = plain or f"fell back to plain prefill: {fallback}"
        prefix = report.prefix if report is not None else last.prefix_tokens
        return Evidence(prompt, fresh=prompt - prefix, prefix=prefix, plain=reason, documents=documents)
    if report is None:  # the prefix cache held this recipe's KV
        prefix = last.prefix_tokens
        return Evidence(prompt, fresh=prompt - prefix, prefix=prefix, documents=documents)
    return Evidence(
        prompt,
        reused=report.cached - report.recomputed,
        recomputed=report.recomputed,
        fresh=prompt - report.cached - report.prefix,
        prefix=report.prefix,
        missing=report.missing,
        documents=documents,
        ms=report.ms,
        tiers=report.tiers,
        decision=report.decision,
        trace=report.trace,
    )
