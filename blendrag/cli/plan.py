"""``blendrag plan``: what the loading controller would choose for a corpus, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from blendrag.cli import options
from blendrag.cli.console import err, interruptible, out, print_json, say
from blendrag.errors import ConfigError
from blendrag.machine import cpu, installed_vllm
from blendrag.tables import table_with

if TYPE_CHECKING:
    from blendrag.control.plan import Plan, TierPlan
    from blendrag.control.prices import Prices
    from blendrag.control.profile import Profile
    from blendrag.lab.profiling.check import Checked
    from blendrag.settings import Settings


def plan(
    index: Annotated[
        Path | None, typer.Option("--index", "-i", help="Folder of the index to plan for.", metavar="FOLDER")
    ] = None,
    chunks: Annotated[int | None, typer.Option(min=1, help="Chunks to plan for instead.")] = None,
    chunk_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens in one of those.")] = None,
    model: options.Model = None,
    similarity_top_k: options.SimilarityTopK = None,
    ratio: options.RecomputeRatio = None,
    prices: Annotated[
        Path | None, typer.Option(help="YAML file with your prices.", metavar="FILE", show_default=False)
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Run a few prompts to compare.")] = False,
    json: options.Json = False,
) -> None:
    """Estimate what each tier would cost and how fast it would answer. Needs `blendrag profile` once."""
    from blendrag.control.estimate import Estimator
    from blendrag.control.plan import Corpus, make_plan, record_bytes
    from blendrag.control.prices import Prices, read_prices
    from blendrag.select import SELECTORS
    from blendrag.settings import PREFIX_CACHING, Settings

    settings = Settings.load(
        model=model, similarity_top_k=similarity_top_k, recompute_ratio=ratio, engine_args=PREFIX_CACHING
    )
    table = read_prices(prices) if prices else settings.prices or Prices()
    with err().status("reading the profile"):
        profile, identity = _profile_of(settings)
    # What else the times depend on, only an engine knows.
    if whose := profile.unlike(settings.blending.selector, cpu=cpu(), vllm=installed_vllm()):
        say(f"these are times {whose}: run blendrag profile again")
    if profile.selector not in SELECTORS:
        raise ConfigError("the profile is of a selector that there is not: run blendrag profile again")
    count, tokens = _size(settings, index, chunks, chunk_tokens, model)
    nbytes = record_bytes(identity, profile.machine.dtype, tokens)
    corpus = Corpus(count, tokens, nbytes, min(settings.similarity_top_k, count))
    estimate = Estimator.of(profile)
    result = make_plan(estimate, corpus, settings.blending.recompute_ratio, table)
    checked = _check(settings, estimate, corpus) if measure else []
    if json:
        print_json({**result.to_dict(), "checked": [_as_dict(one) for one in checked]})
        return
    _print(result, table, profile, settings, out())
    if checked:
        out().print(_checked_table(checked))


def _profile_of(settings: Settings) -> tuple[Profile, Any]:
    from blendrag.control.profile import latest_profile, profile_digest
    from blendrag.models import resolve_model
    from blendrag.serving.identity import kv_identity

    folder = resolve_model(settings.model, cache_dir=settings.cache_dir, revision=settings.revision)
    identity = kv_identity(settings, folder)
    found = latest_profile(settings.cache_dir, profile_digest(identity))
    if isinstance(found, str):
        raise ConfigError(found)
    return found, identity


def _size(
    settings: Settings, index: Path | None, chunks: int | None, chunk_tokens: int | None, model: str | None
) -> tuple[int, int]:
    """Chunks of the corpus, and tokens in one."""
    if chunks is not None and index is not None:
        raise ConfigError("--index or --chunks, not both")
    if chunks is not None:
        return chunks, chunk_tokens or settings.chunk_tokens
    folder = index or options.DEFAULT_INDEX
    if index is None and not folder.is_dir():
        raise ConfigError("name what to plan for: an index (--index), or its size (--chunks, --chunk-tokens)")
    from blendrag.cli.opening import open_index

    with open_index(folder, model=model) as opened:
        facts = opened.stats()["chunks"]
    if not facts["chunks"]:
        raise ConfigError(f"the index {str(folder)!r} holds no chunks: ingest some, or give --chunks")
    return facts["chunks"], chunk_tokens or max(1, round(facts["tokens"] / facts["chunks"]))


def _check(settings: Settings, estimate: Any, corpus: Any) -> list[Checked]:
    from blendrag.lab.profiling.check import check_plan
    from blendrag.progress import progress_bar

    with interruptible("interrupted"), progress_bar() as progress:
        return check_plan(settings, estimate, corpus, settings.blending.recompute_ratio, progress)


def _print(plan: Plan, prices: Prices, profile: Profile, settings: Settings, console: Console) -> None:
    corpus, machine = plan.corpus, profile.machine
    lines = [
        f"{corpus.chunks:,} chunks of {corpus.chunk_tokens:,} tokens: {plan.nbytes / 1e9:,.2f} GB of KV"
        f" ({settings.codec}, {corpus.chunk_bytes / corpus.chunk_tokens:,.0f} bytes per token).",
        f"A prompt of {corpus.top_k} chunks and {corpus.fresh_tokens} other tokens takes"
        f" {_ms(plan.plain_s)} by plain prefill.",
        f"{profile.model}, measured {profile.date} on {machine.cpu}, {machine.threads} threads,"
        f" {machine.device}.",
    ]
    for line in lines:
        console.print(Text(line))
    console.print(_tier_table(plan, prices))
    console.print(Text(f"Cheapest tier that adds no delay at ratio {plan.ratio:g} (mode B): {_mode_b(plan)}"))
    for tier in plan.tiers:
        console.print(Text(f"{tier.tier} (mode C): {_mode_c(plan, tier)}"))


def _tier_table(plan: Plan, prices: Prices) -> Table:
    cost, recompute = f"{prices.currency} per month", f"recompute at {plan.ratio:g}"
    table = table_with("tier", cost, "load", recompute, "TTFT", "plain / TTFT", "mode A ratio", "its TTFT")
    for tier in plan.tiers:
        table.add_row(
            Text(tier.tier),
            "" if tier.cost is None else f"{tier.cost:,.2f}",
            _ms(tier.load_s),
            _ms(tier.recompute_s),
            _ms(tier.ttft_s),
            f"{plan.plain_s / tier.ttft_s:.2f}x",
            f"{tier.ratio:.2f}",
            _ms(tier.auto.blend_s),
        )
    return table


def _mode_b(plan: Plan) -> str:
    choice = plan.choice
    return choice.why if choice.tier is None else f"{choice.tier}: it {choice.why}"


def _mode_c(plan: Plan, tier: TierPlan) -> str:
    decision = tier.fixed
    if not any(decision.load):
        return f"prefill plainly: {_ms(plan.plain_s)} against {_ms(tier.ttft_s)} with all chunks loaded"
    return f"{decision.why}; {_ms(decision.blend_s)} against {_ms(plan.plain_s)} by plain prefill"


def _checked_table(checked: list[Checked]) -> Table:
    title = "Time to first token, estimated and measured (disks cold)"
    table = table_with("tier", "how", "estimate", "measured", "error", title=title)
    for one in checked:
        times = (_ms(one.estimated_s), _ms(one.measured_s), f"{one.error:+.0%}")
        table.add_row(Text(one.tier), Text(one.what), *times)
    return table


def _as_dict(checked: Checked) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(checked) | {"error": checked.error}


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms"
