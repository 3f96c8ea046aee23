"""``bench sweep``, ``load`` and ``beside``: what the time depends on, and many requests at once."""

from __future__ import annotations

from typing import Annotated

import typer

from blendrag.bench.cli.shared import Chunks, ChunkTokens, Json, Plot, Seed, app, measured
from blendrag.cli.options import Model


@app.command()
def sweep(
    axis: Annotated[
        str,
        typer.Option(
            help="What is varied: chunks, chunk_tokens, ratio, question_tokens, batch, codec or tier."
        ),
    ] = "chunks",
    values: Annotated[
        str | None, typer.Option(help="Its values, with commas between them.", metavar="A,B,...")
    ] = None,
    chunks: Chunks = 6,
    chunk_tokens: ChunkTokens = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts per value, each with all arms.")] = 4,
    model: Model = None,
    plot: Plot = None,
    json: Json = None,
    seed: Seed = 0,
) -> None:
    """Time to first token against one parameter: full prefill, prefix caching, full reuse, blending."""
    from blendrag.bench.sweep import SweepOptions, run_sweep
    from blendrag.bench.sweep_plot import draw_sweep
    from blendrag.bench.sweep_points import axis_named
    from blendrag.bench.sweep_table import print_sweep
    from blendrag.settings import Settings

    settings = Settings.load(model=model, prefix_caching=True)
    chosen = axis_named(axis).values(values, settings)
    options = SweepOptions(axis, chosen, chunks, chunk_tokens, repeats, seed)
    measured(lambda progress: run_sweep(settings, options, progress), print_sweep, json, plot, draw_sweep)
