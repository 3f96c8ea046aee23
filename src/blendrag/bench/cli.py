"""``blendrag bench``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from blendrag.cli.console import Commands, err, interruptible, out
from blendrag.cli.options import Model

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Measure on this machine.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def bench() -> None:
    """Measure on this machine."""


@app.command()
def ttft(
    chunks: Annotated[int, typer.Option(min=2, help="Chunks in a prompt.")] = 6,
    chunk_tokens: Annotated[int, typer.Option(min=8, help="Tokens in a chunk.")] = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts measured, each with all arms.")] = 5,
    ratios: Annotated[str, typer.Option(help="Recompute ratios to measure.")] = "0.05,0.15,0.3",
    selector: Annotated[
        str | None, typer.Option(help="Which cached tokens are recomputed: hkvd, first_k, ...")
    ] = None,
    model: Model = None,
    data: Annotated[
        Path | None, typer.Option(help="Text or JSONL file to take chunks from.", metavar="FILE")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the results: .png, .svg or .pdf.")] = None,
    json: Annotated[
        str | None, typer.Option(help="Write the results as JSON; - for standard output.", metavar="FILE")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random choice and order of chunks.")] = 0,
) -> None:
    """Time to first token: full prefill, vLLM's prefix caching, full reuse, and blending."""
    from blendrag.bench.plot import check_plot_path, draw
    from blendrag.bench.progress import bench_progress
    from blendrag.bench.report import check_json_path, print_table, to_json, write_json
    from blendrag.bench.ttft import BenchOptions, parse_ratios, run_ttft
    from blendrag.settings import Settings

    options = BenchOptions(chunks, chunk_tokens, repeats, parse_ratios(ratios), data, seed)
    settings = Settings.load(model=model, selector=selector, prefix_caching=True)
    if plot:
        check_plot_path(plot)
    if json and json != "-":
        check_json_path(Path(json))
    with interruptible("interrupted"), bench_progress() as progress:
        results = run_ttft(settings, options, progress)
    print_table(results, err() if json == "-" else out())
    if json == "-":
        sys.stdout.write(to_json(results))
    elif json:
        write_json(results, Path(json))
    if plot:
        draw(results, plot)


@app.command()
def codecs(
    chunks: Annotated[int, typer.Option(min=2, help="Chunks in a prompt.")] = 6,
    chunk_tokens: Annotated[int, typer.Option(min=8, help="Tokens in a chunk.")] = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts measured, each with all codecs.")] = 24,
    model: Model = None,
    data: Annotated[
        Path | None, typer.Option(help="Text or JSONL file to take chunks from.", metavar="FILE")
    ] = None,
    json: Annotated[
        str | None, typer.Option(help="Write the results as JSON; - for standard output.", metavar="FILE")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random choice and order of chunks.")] = 0,
) -> None:
    """Codecs of stored KV: size, speed, and what each changes at ratios of 0, 0.15 (or the one set) and 1."""
    from blendrag.bench.codecs import run_codecs
    from blendrag.bench.codecs_table import print_codecs
    from blendrag.bench.progress import bench_progress
    from blendrag.bench.report import check_json_path, to_json, write_json
    from blendrag.bench.ttft import BenchOptions
    from blendrag.settings import Settings

    settings = Settings.load(model=model)
    ratios = tuple(sorted({0.0, settings.recompute_ratio, 1.0}))
    options = BenchOptions(chunks, chunk_tokens, repeats, ratios, data, seed)
    if json and json != "-":
        check_json_path(Path(json))
    with interruptible("interrupted"), bench_progress() as progress:
        results = run_codecs(settings, options, progress)
    print_codecs(results, err() if json == "-" else out())
    if json == "-":
        sys.stdout.write(to_json(results))
    elif json:
        write_json(results, Path(json))
