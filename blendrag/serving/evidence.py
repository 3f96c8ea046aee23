"""The evidence of what was computed for a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from blendrag.engine.wire.prefixes import PrefixPath
from blendrag.engine.wire.recipe import Recipe
from blendrag.engine.wire.report import BlendReport, PrefillFacts
from blendrag.prompt import PromptPlan

Mode = Literal["exact", "mixed", "blended", "plain"]
Speculated = Literal["adopted", "discarded", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence(PrefillFacts):
    """A record of how a prompt was prefilled: how many tokens were reused, recomputed and fresh, and why.

    The worker's report is part of it; its exact tokens are among the reused ones.
    mode: how the prompt was prefilled. exact: all of its documents' KV was to come from the tree of
    prefixes; mixed: that of its first ones did, and the rest was blended.
    reused: taken from the store, and moved at most by what tokens near them have moved; or, of blended
    documents, from vLLM's own prefix cache, behind an earlier prompt that began in the same way.
    fresh: computed because no KV was there to take (system prompt, separators, question, misses).
    prefix: all others that vLLM's prefix cache had.
    plain: why the prompt was prefilled without blending; None if it was blended.
    documents: one row per segment of the prompt, as ``explain()`` gives them; in answers of frameworks and
    servers, those about documents.
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


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """A plan, and how the engine prefills it: by a recipe, or along a path in the tree of exact prefixes, or
    plainly. At most one of the two is there.

    plain: why it is not blended. budget: of KV, if there is to be one. unstored: keys of chunks in the plan
    whose KV is not there.
    """

    plan: PromptPlan
    recipe: Recipe | None = None
    path: PrefixPath | None = None
    plain: str | None = None
    budget: int | str | None = None
    unstored: frozenset[str] = frozenset()

    @property
    def exact(self) -> bool:
        """Return whether the prompt begins with an exact prefix, and is not blended."""
        return self.path is not None and self.path.held > 0

    def evidence(self, report: BlendReport | None, prefix: int) -> Evidence:
        """Return the evidence of the prompt by what the engine reported. prefix: tokens that the engine did
        not compute, where it reported nothing."""
        report, prompt = report or BlendReport(prefix=prefix), len(self.plan.token_ids)
        mode, plain, again = self._mode(report), self.plain, 0
        if report.fallback:
            plain = plain or f"fell back to plain prefill: {report.fallback}"
            report = BlendReport(prefix=report.prefix, exact=report.exact)
        elif self.recipe is not None:  # documents that the prefix cache had
            prefix = report.prefix
            again = sum(min(length, max(0, prefix - start)) for _, start, length in self.recipe.spans)
        whole = {"exact": "its documents are exact prefixes", "plain": "it was not blended"}.get(mode)
        facts = report.facts() | ({} if self.budget is None or whole is None else {"kv_whole": whole})
        at = report.computed_at or f"{report.prefix + report.exact}-"
        facts["computed_at"] = f"{at}{prompt - 1}"
        return Evidence(
            **facts,
            prompt=prompt,
            mode=mode,
            reused=report.cached - report.recomputed + report.exact + again,
            fresh=prompt - report.cached - report.prefix - report.exact,
            prefix=report.prefix - again,
            plain=plain if mode == "plain" else None,
            documents=tuple(self._documents(report.attention)),
        )

    def _documents(self, attention: Mapping[str, float]) -> Iterator[dict[str, Any]]:
        held = self.path.held_end if self.path else 0
        for row in self.plan.describe(self.unstored, held):
            share = attention.get(row["chunk_key"] or "")
            yield row if share is None else {**row, "attention": share}

    def _mode(self, report: BlendReport) -> Mode:
        if report.fallback:
            return "plain"
        if self.recipe is not None:
            return "mixed" if report.exact else "blended"
        if self.path is None:
            return "plain"
        _, start, length = self.plan.spans[-1]
        return "exact" if self.path.held_end == start + length else "plain"
