"""The controller's three choices: a ratio (mode A), a tier (mode B), the chunks worth loading (mode C)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blendrag.control.estimate import Estimator

_ABOVE_ZERO = 1e-9  # from here on T_recompute is linear in the ratio
MIN_RATIO = 0.15  # r*: the paper's least ratio without a loss in quality (section 5.1, figure 16)


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """A chunk of a prompt whose KV is stored: its tokens, the bytes of its record, the label of its tier."""

    tokens: int
    nbytes: int
    tier: str


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision for a prompt. blend_s <= plain_s.

    load: per chunk, as they were given; the others are computed like fresh tokens.
    ratio: share of the loaded chunks' tokens to recompute; 1 if none is loaded.
    blend_s: estimated time to the first token with this decision. plain_s: with plain prefill.
    """

    load: tuple[bool, ...]
    ratio: float
    blend_s: float
    plain_s: float
    why: str


@dataclass(frozen=True, slots=True)
class TierChoice:
    """The cheapest tier that adds no delay; None if every tier adds some. ``why``: for people."""

    tier: str | None
    why: str


def ratio_for(estimate: Estimator, load_s: float, cached: int, fresh: int, least: float = MIN_RATIO) -> float:
    """Return the ratio of mode A, with T_recompute = T_load, at least ``least`` and at most 1.

    With a higher one the request would wait; with a lower one the processor would wait for the tier. A
    selector that reads the question recomputes nothing while KV loads, so all of its ratio is waited for: it
    gets ``least``.
    """
    if estimate.reads_question:
        return least
    everything = estimate.recompute.seconds(cached, fresh, 1.0)
    if load_s >= everything:
        return 1.0
    hardly_any = estimate.recompute.seconds(cached, fresh, _ABOVE_ZERO)
    if load_s <= hardly_any:
        return least
    return max(least, (load_s - hardly_any) / (everything - hardly_any))


def cheapest_tier(estimate: Estimator, nbytes: int, cached: int, fresh: int, ratio: float) -> TierChoice:
    """Return the tier of mode B: of those with T_load <= T_recompute the lowest, which is the cheapest, as a
    stack has the fastest and dearest first.

    nbytes: of the KV that a prompt loads. No tier is hidden where the selector reads the question.
    """
    recompute = estimate.recompute.seconds(cached, fresh, ratio)
    loads = {tier: estimate.load_s(nbytes, tier) for tier in estimate.tiers}
    fastest = min(loads, key=loads.__getitem__)
    hides = estimate.hides_loading(ratio)
    hidden = [tier for tier, load in loads.items() if hides and load <= recompute]
    if hidden:
        tier = hidden[-1]
        return TierChoice(tier, f"loads in {loads[tier]:.3g} s behind {recompute:.3g} s of recomputing")
    why = f" at ratio {ratio:.2f}: recomputing takes {recompute:.3g} s"
    if not hides:
        why = ": the selector reads the question, so everything is loaded before"
        why += f" {recompute:.3g} s of recomputing"
    at_best = f"the fastest, {fastest}, loads in {loads[fastest]:.3g} s"
    return TierChoice(None, f"every tier adds delay{why}, and {at_best}")


def decide(
    estimate: Estimator,
    chunks: Sequence[ChunkCost],
    fresh_tokens: int,
    ratio: float | None,
    least: float = MIN_RATIO,
) -> Decision:
    """Decide by mode C: load those chunks with which the estimate is least; none if plain prefill is the
    fastest (decision D13), or if all would be recomputed anyway. Twelve chunks take tens of microseconds.

    ``ratio`` None: mode A sets it for what is loaded, to ``least`` or more. Chunks are tried cheapest first,
    by load time per token: the first, the first two, and so on. A tie goes to fewer loaded chunks: they are
    exact. A tier that was not measured is taken for as slow as the slowest that was.
    """
    total = fresh_tokens + sum(chunk.tokens for chunk in chunks)
    plain = best = estimate.prefill.seconds(0, total)
    slowest = max(estimate.tiers, key=lambda name: estimate.load_s(1, name))
    costs = []
    for at, chunk in enumerate(chunks):
        tier = chunk.tier if chunk.tier in estimate.tiers else slowest
        costs.append((estimate.load_s(chunk.nbytes, tier) / max(1, chunk.tokens), at, tier, chunk))
    costs.sort(key=lambda cost: cost[:2])
    count, chosen, loading, cached = 0, 1.0, 0.0, 0
    nbytes: dict[str, int] = {}
    for number, (_, _, tier, chunk) in enumerate(costs, start=1):
        nbytes[tier] = nbytes.get(tier, 0) + chunk.nbytes
        cached += chunk.tokens
        load = sum(estimate.load_s(of_tier, name) for name, of_tier in nbytes.items())
        fresh = total - cached
        share = ratio_for(estimate, load, cached, fresh, least) if ratio is None else ratio
        seconds = estimate.blend_s(load, estimate.recompute.seconds(cached, fresh, share), share)
        if share < 1.0 and seconds < best:
            best, count, chosen, loading = seconds, number, share, load
    loaded = {at for _, at, _, _ in costs[:count]}
    load_these = tuple(at in loaded for at in range(len(chunks)))
    return Decision(load_these, chosen, best, plain, _why(count, len(chunks), loading))


def _why(count: int, of: int, load_s: float) -> str:
    if count == 0:
        return "plain prefill is estimated to be faster" if of else "nothing is stored"
    rest = "" if count == of else f"; the other {of - count} are sooner computed than loaded"
    return f"{count} of {of} chunks load in {1e3 * load_s:.0f} ms{rest}"
