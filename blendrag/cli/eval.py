"""``blendrag eval``: are the answers still right?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blendrag.cli.console import measured
from blendrag.cli.options import Json, Model, Paste, Plot, Ratios, Seed, path_option


def evaluate(
    data: Annotated[Path, path_option("File of questions with answers and documents; may be gzipped.")],
    format: Annotated[
        str,
        typer.Option("--format", "-f", help="How FILE is written: musique, hotpot, squad, kv:8, ..."),
    ] = "jsonl",
    model: Model = None,
    arms: Annotated[
        str | None,
        typer.Option(
            help="What to compare: reuse, reuse:start, hkvd@0.15, paper, ...; by default, ratios"
            " of the selector that is set and of its rivals."
        ),
    ] = None,
    ratios: Ratios = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Questions asked, chosen at random; by default all.")
    ] = None,
    seed: Seed = 0,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Loss allowed, in nats: bounds both what is lost per token of the right"
            " answer and the first token's KL, each by the upper end of its 95 % interval.",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest free answer, in tokens.")] = 24,
    rows: Annotated[
        Path | None, path_option("Keep every answer here: the same command goes on from it.")
    ] = None,
    plot: Plot = None,
    json: Json = False,
    paste: Paste = None,
) -> None:
    """Compare blended answers with those of full prefill, on your model and documents."""
    from blendrag.lab.bench.axes import parse_ratios
    from blendrag.lab.evaluate.arms import parse_arms
    from blendrag.lab.evaluate.recommend import DEFAULT_TOLERANCE
    from blendrag.lab.evaluate.run import EvalOptions, run_eval
    from blendrag.settings import Settings

    settings = Settings.load(model=model)
    at = parse_ratios(ratios) if ratios else None
    wanted = parse_arms(arms.split(",") if arms else (), at, settings)
    allowed = DEFAULT_TOLERANCE if tolerance is None else tolerance
    options = EvalOptions(data, format, wanted, limit, seed, allowed, max_tokens, rows)
    left = f"interrupted: the same command goes on from {rows}" if rows else "interrupted"
    measured(lambda bar: run_eval(settings, options, bar), json, "eval", plot, paste, left)
