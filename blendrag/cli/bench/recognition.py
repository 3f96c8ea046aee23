"""``bench recognition``: what is recognised in applications' prompts, and how fast."""

from __future__ import annotations

from typing import Annotated

import typer

from blendrag.cli import options
from blendrag.cli.measured import measured


def recognition(
    prompts: Annotated[int, typer.Option(min=2, help="Prompts of each shape.")] = 500,
    documents: Annotated[int, typer.Option(min=2, help="How many documents there are.")] = 200,
    chunk_tokens: Annotated[int, typer.Option(min=64, help="Tokens of a document, at most.")] = 256,
    top_k: Annotated[int, typer.Option(min=1, help="Documents in a prompt.")] = 5,
    zipf: Annotated[float, typer.Option(min=0.0, help="Popularity of documents: rank**-zipf.")] = 1.0,
    chunks: Annotated[
        int, typer.Option(min=0, help="Chunks known while one prompt is searched: 5 kB of memory each.")
    ] = 100_000,
    model: options.Model = None,
    json: options.Json = False,
    paste: options.Paste = None,
    seed: options.Seed = 0,
) -> None:
    """Replay prompts as applications make them: what is known of their documents though nobody names any.
    And how long one prompt is searched. Starts no engine."""
    from blendrag.lab.bench.recognition import RecognitionOptions, print_recognition, run_recognition
    from blendrag.settings import Settings

    wanted = RecognitionOptions(prompts, documents, chunk_tokens, top_k, zipf, chunks, seed)
    settings = Settings.load(model=model)
    measured(
        lambda bar: run_recognition(settings, wanted, bar),
        print_recognition, json, paste=paste, name="recognition",
    )  # fmt: skip
