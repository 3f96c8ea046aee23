"""``bench layers``: inside the model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blendrag.cli.bench.shared import Chunks, ChunkTokens, Json, Seed, app, measured
from blendrag.cli.options import Model


@app.command()
def layers(
    prompts: Annotated[int, typer.Option(min=1, help="Prompts probed.")] = 8,
    chunks: Chunks = 6,
    chunk_tokens: ChunkTokens = 256,
    queries: Annotated[int, typer.Option(min=1, help="Last tokens whose attention is compared.")] = 16,
    model: Model = None,
    data: Annotated[
        Path | None, typer.Option(help="Questions over documents, instead of built-in text.", metavar="FILE")
    ] = None,
    format: Annotated[str, typer.Option(help="How they are written: musique, squadsplit, ...")] = "jsonl",
    json: Json = None,
    seed: Seed = 0,
) -> None:
    """Layer by layer: which tokens deviate, whether the same ones in the next layer, what attention makes of
    it."""
    from blendrag.lab.evaluate.layers import LayerOptions, print_layers, run_layers
    from blendrag.settings import Settings

    options = LayerOptions(prompts, chunks, chunk_tokens, queries, data, format, seed)
    settings = Settings.load(model=model)
    measured(lambda progress: run_layers(settings, options, progress), print_layers, json)
