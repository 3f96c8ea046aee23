"""``bench kernels`` and ``layers``: inside the model."""

from __future__ import annotations

from typing import Annotated

import typer

from blendrag.bench.cli.shared import Chunks, ChunkTokens, Json, Ratio, Seed, app, measured
from blendrag.cli.options import Model


@app.command()
def kernels(
    chunks: Chunks = 6,
    chunk_tokens: ChunkTokens = 512,
    ratio: Ratio = 0.15,
    repeats: Annotated[int, typer.Option(min=1, help="How often each piece of a layer is timed.")] = 20,
    model: Model = None,
    json: Json = None,
    seed: Seed = 0,
) -> None:
    """One layer's pieces (select, rotate, attention, projections, MLP, ...) against this machine's limits."""
    from blendrag.bench.kernels import KernelOptions, run_kernels
    from blendrag.bench.kernels_table import print_kernels
    from blendrag.settings import Settings

    options = KernelOptions(chunks, chunk_tokens, ratio, repeats, seed)
    settings = Settings.load(model=model)
    measured(lambda progress: run_kernels(settings, options, progress), print_kernels, json)
