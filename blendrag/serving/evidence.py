"""The evidence of what was computed for a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from blendrag.engine.client.generation import Delta
from blendrag.engine.prefixes import PrefixPath
from blendrag.engine.recipe import Recipe
from blendrag.engine.report import BlendReport
from blendrag.load.trace import Event
from blendrag.prompt import PromptPlan

Mode = Literal["exact", "mixed", "blended", "plain"]
Speculated = Literal["adopted", "discarded", "none"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence of a prompt: which of its tokens were computed, in tokens, and why not fewer.

    mode: how the prompt was prefilled. exact: all of its documents' KV was to come from the tree of
    prefixes; mixed: that of its first ones did, and the rest was blended.
    reused: taken from the store as they are, or, of blended documents, from vLLM's own prefix cache, behind
    an earlier prompt that began in the same way. exact: those of them that came from the tree, as full
    prefill makes them. recomputed: taken from the store and repaired, or computed in the block of the paged
    cache in which the documents end.
    fresh: computed because no KV was there to take (system prompt, separators, question, misses).
    prefix: all others that vLLM's prefix cache had.
    plain: why the prompt was prefilled without blending; None if it was blended.
    documents: one row per segment of the prompt, as ``explain()`` gives them.
    ms: where the fused prefill spent its time: load, select, recompute.
    tiers: chunks loaded, by the tier they came from. decision: why the controller loaded these and no others.
    kv_kept: tokens of KV that the answer was decoded from, on average of a head, where some was evicted;
    kv_freed: blocks that this gave back; kv_whole: why none was, where there is a budget.
    trace: if it was asked for, what was loaded and computed when (see ``load.trace``).
    speculation: whether the answer had been begun before it was asked for (adopted); or one had, that nobody
    asked for then (discarded).
    resumed: why the engine failed in the middle of the answer, and how many of its tokens were given out by
    then, and prefilled behind the prompt by the next one. Of a resumed answer, all else is of its last part:
    those tokens are among the computed ones.
    """

    prompt: int
    mode: Mode = "plain"
    reused: int = 0
    exact: int = 0
    recomputed: int = 0
    fresh: int = 0
    prefix: int = 0
    plain: str | None = None
    missing: dict[str, str] = field(default_factory=dict)
    documents: tuple[dict[str, Any], ...] = ()
    ms: dict[str, float] = field(default_factory=dict)
    tiers: dict[str, int] = field(default_factory=dict)
    decision: str = ""
    kv_kept: int = 0
    kv_freed: int = 0
    kv_whole: str = ""
    trace: tuple[Event, ...] = ()
    speculation: Speculated = "none"
    resumed: dict[str, int] = field(default_factory=dict)

    @property
    def computed(self) -> int:
        """The number of prompt tokens that the model computed in full."""
        return self.recomputed + self.fresh


def evidence_of(
    plan: PromptPlan,
    recipe: Recipe | None,
    plain: str | None,
    last: Delta,
    path: PrefixPath | None = None,
    budget: int | str | None = None,
) -> Evidence:
    """Put together what was planned and what the engine reported. path: of a prompt without a recipe. budget:
    of KV, if there was to be one."""
    evidence = _evidence(plan, recipe, plain, last, path)
    whole = {"exact": "its documents are exact prefixes", "plain": "it was not blended"}.get(evidence.mode)
    return evidence if budget is None or whole is None else replace(evidence, kv_whole=whole)


def _evidence(
    plan: PromptPlan, recipe: Recipe | None, plain: str | None, last: Delta, path: PrefixPath | None
) -> Evidence:
    prompt = len(plan.token_ids)
    documents = tuple(plan.describe())
    report = last.report
    fallback = report and report.fallback
    if recipe is None and path is not None and not fallback:
        return _of_path(plan, path, plain, last)
    if recipe is None or fallback:
        reason = plain or f"fell back to plain prefill: {fallback}"
        prefix = report.prefix if report is not None else last.prefix_tokens
        return Evidence(prompt, fresh=prompt - prefix, prefix=prefix, plain=reason, documents=documents)
    prefix = report.prefix if report is not None else last.prefix_tokens
    again = sum(min(length, max(0, prefix - start)) for _, start, length in recipe.spans)
    if report is None:  # the prefix cache held this recipe's KV
        left = prefix - again
        return Evidence(prompt, "blended", again, fresh=prompt - prefix, prefix=left, documents=documents)
    return Evidence(
        prompt,
        "mixed" if report.exact else "blended",
        reused=report.cached - report.recomputed + report.exact + again,
        exact=report.exact,
        recomputed=report.recomputed,
        fresh=prompt - report.cached - report.prefix - report.exact,
        prefix=prefix - again,
        missing=report.missing,
        documents=documents,
        ms=report.ms,
        tiers=report.tiers,
        decision=report.decision,
        kv_kept=report.kv_kept,
        kv_freed=report.kv_freed,
        kv_whole=report.kv_whole,
        trace=report.trace,
    )


def _of_path(plan: PromptPlan, path: PrefixPath, plain: str | None, last: Delta) -> Evidence:
    """Return the evidence of a prompt that began with an exact prefix, or left one behind."""
    spans, report = plan.spans, last.report or BlendReport(prefix=last.prefix_tokens)
    whole = path.held_end == spans[-1][1] + spans[-1][2]
    return Evidence(
        len(plan.token_ids),
        "exact" if whole else "plain",
        reused=report.exact,
        exact=report.exact,
        fresh=len(plan.token_ids) - report.exact - report.prefix,
        prefix=report.prefix,
        plain=None if whole else plain,
        documents=tuple(plan.describe()),
        ms=report.ms,
        tiers=report.tiers,
    )
