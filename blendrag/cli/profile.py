"""``blendrag profile``: measure this machine for the loading controller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from blendrag.cli import options
from blendrag.cli.console import err, interruptible, out, print_json, say
from blendrag.tables import table_with

if TYPE_CHECKING:
    from blendrag.control.profile import Profile
    from blendrag.settings import Settings

_FRESH_TOKENS = 64  # of a prompt around its chunks: system prompt, separators, a question


def profile(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer points, once each: half a minute.")] = False,
    model: options.Model = None,
    json: options.Json = False,
) -> None:
    """Measure prefill, blending and the tiers here, and keep the result for the engine."""
    from blendrag.lab.profiling.measure import QUICK, Grid, measure_profile
    from blendrag.progress import progress_bar
    from blendrag.settings import PREFIX_CACHING, Settings

    settings = Settings.load(model=model, engine_args=PREFIX_CACHING)
    with interruptible("interrupted: nothing was written"), progress_bar() as progress:
        measured = measure_profile(settings, QUICK if quick else Grid(), progress)
    path = measured.save(settings.cache_dir)
    if json:
        print_json(measured.model_dump(mode="json"))
    _print(measured, settings, err() if json else out())
    for spec in settings.stack:
        if spec.label not in measured.tiers:
            say(f"{spec.label}: not measured, because it may not be written")
    say(f"written to {path}")


def _print(measured: Profile, settings: Settings, console: Console) -> None:
    """Print how fast each tier is, what that makes of a prompt, and which one mode B takes."""
    from blendrag.control.choose import cheapest_tier, ratio_for
    from blendrag.control.estimate import Estimator

    estimate, machine = Estimator.of(measured), measured.machine
    ratio = settings.blending.recompute_ratio
    cached = settings.similarity_top_k * settings.chunk_tokens  # tokens of a prompt's chunks
    nbytes = cached * measured.kv_bytes
    recompute = estimate.recompute.seconds(cached, _FRESH_TOKENS, ratio)
    title = f"Tiers, and a prompt of {settings.similarity_top_k} chunks from each, {ratio:g} recomputed"
    columns = ("MB/s", "ms per call", "calls", "load ms", "TTFT ms", "mode A ratio")
    table = table_with("tier", *columns, title=title)
    for name, speed in measured.tiers.items():
        load = estimate.load_s(nbytes, name)
        table.add_row(
            Text(name),
            f"{speed.bytes_per_s / 1e6:,.0f}",
            f"{1e3 * speed.latency_s:.2f}",
            str(speed.calls),
            f"{1e3 * load:,.0f}",
            f"{1e3 * estimate.blend_s(load, recompute, ratio):,.0f}",
            f"{ratio_for(estimate, load, cached, _FRESH_TOKENS, ratio):.2f}",
        )
    lowest = cheapest_tier(estimate, nbytes, cached, _FRESH_TOKENS, ratio)
    said = lowest.why if lowest.tier is None else f"{lowest.tier}: it {lowest.why}"
    where = f"{machine.cpu}, {machine.threads} threads, {machine.device}"
    console.print(Text(f"{measured.model} on {where}"))
    console.print(table)
    console.print(Text(f"Lowest tier that adds no delay (mode B): {said}."))
