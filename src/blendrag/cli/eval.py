"""``blendrag eval``: are the answers still right?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from blendrag.cli.console import err, interruptible, out
from blendrag.cli.options import Model


def evaluate(
    data: Annotated[
        Path, typer.Option(help="Questions, answers and documents, gzipped or not.", metavar="FILE")
    ],
    format: Annotated[
        str,
        typer.Option("--format", "-f", help="How FILE is written: musique, hotpot, squad, kv:8, ..."),
    ] = "jsonl",
    model: Model = None,
    arms: Annotated[
        str | None,
        typer.Option(help="What to compare: reuse, reuse:start, hkvd_v@0.15, paper, ...; by default, ratios"
                     " of the selector that is set and of its rivals."),
    ] = None,
    ratios: Annotated[
        str | None, typer.Option(help="Recompute ratios of the selectors that are named without one.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Questions asked, chosen at random; by default all.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the choice of questions, and of documents.")] = 0,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0.0, help="Loss allowed, in nats: bounds both what is lost per token of the right"
                     " answer and the first token's KL, each by the upper end of its 95 % interval."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest free answer, in tokens.")] = 24,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the results: .png, .svg or .pdf.", metavar="FILE")
    ] = None,
    json: Annotated[
        str | None, typer.Option(help="Write the results as JSON; - for standard output.", metavar="FILE")
    ] = None,
) -> None:
    """Compare blended answers with those of full prefill, on your model and documents."""
    from blendrag.bench.plot import check_plot_path
    from blendrag.bench.progress import bench_progress
    from blendrag.bench.report import check_json_path, to_json, write_json
    from blendrag.bench.ttft import parse_ratios
    from blendrag.evaluate.arms import parse_arms
    from blendrag.evaluate.plot import draw
    from blendrag.evaluate.recommend import DEFAULT_TOLERANCE
    from blendrag.evaluate.report import print_evaluation
    from blendrag.evaluate.run import EvalOptions, run_eval
    from blendrag.settings import Settings

    settings = Settings.load(model=model)
    at = parse_ratios(ratios) if ratios else None
    wanted = parse_arms(arms.split(",") if arms else (), at, settings)
    file = Path(json) if json and json != "-" else None
    kept = file and file.with_name(f"{file.name}.rows.jsonl")
    if plot:
        check_plot_path(plot)
    if file:
        check_json_path(file)
    allowed = DEFAULT_TOLERANCE if tolerance is None else tolerance
    options = EvalOptions(data, format, wanted, limit, seed, allowed, max_tokens, kept)
    left = f"interrupted: the same command goes on from {kept}" if kept else "interrupted"
    with interruptible(left), bench_progress() as progress:
        results = run_eval(settings, options, progress)
    if json == "-":
        sys.stdout.write(to_json(results))
    elif file:
        write_json(results, file)
    print_evaluation(results, err() if json == "-" else out())
    if plot:
        draw(results, plot)
