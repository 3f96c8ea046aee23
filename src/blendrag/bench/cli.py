"""``blendrag bench``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from blendrag.cli.console import Commands, err, interruptible, out
from blendrag.cli.options import Model

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Measure on this machine.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


_Json = Annotated[
    str | None, typer.Option(help="Write the results as JSON; - for standard output.", metavar="FILE")
]
_Plot = Annotated[Path | None, typer.Option(help="Draw the results: .png, .svg or .pdf.", metavar="FILE")]
_Chunks = Annotated[int, typer.Option(min=2, help="Chunks in a prompt.")]
_ChunkTokens = Annotated[int, typer.Option(min=8, help="Tokens in a chunk.")]
_Seed = Annotated[int, typer.Option(help="Of the random choice and order of chunks.")]


@app.callback()
def bench() -> None:
    """Measure on this machine."""


@app.command()
def ttft(
    chunks: _Chunks = 6,
    chunk_tokens: _ChunkTokens = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts measured, each with all arms.")] = 5,
    ratios: Annotated[str, typer.Option(help="Recompute ratios to measure.")] = "0.05,0.15,0.3",
    selector: Annotated[
        str | None, typer.Option(help="Which cached tokens are recomputed: hkvd, first_k, ...")
    ] = None,
    model: Model = None,
    data: Annotated[
        Path | None, typer.Option(help="Text or JSONL file to take chunks from.", metavar="FILE")
    ] = None,
    plot: _Plot = None,
    json: _Json = None,
    seed: _Seed = 0,
) -> None:
    """Time to first token: full prefill, vLLM's prefix caching, full reuse, and blending."""
    from blendrag.bench.plot import check_plot_path, draw
    from blendrag.bench.progress import bench_progress
    from blendrag.bench.report import print_table
    from blendrag.bench.ttft import BenchOptions, parse_ratios, run_ttft
    from blendrag.settings import Settings

    options = BenchOptions(chunks, chunk_tokens, repeats, parse_ratios(ratios), data, seed)
    settings = Settings.load(model=model, selector=selector, prefix_caching=True)
    if plot:
        check_plot_path(plot)
    _check(json)
    with interruptible("interrupted"), bench_progress() as progress:
        results = run_ttft(settings, options, progress)
    _show(results, json, print_table)
    if plot:
        draw(results, plot)


@app.command()
def codecs(
    chunks: _Chunks = 6,
    chunk_tokens: _ChunkTokens = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts measured, each with all codecs.")] = 24,
    model: Model = None,
    data: Annotated[
        Path | None, typer.Option(help="Text or JSONL file to take chunks from.", metavar="FILE")
    ] = None,
    json: _Json = None,
    seed: _Seed = 0,
) -> None:
    """Codecs of stored KV: size, speed, and what each changes at ratios of 0, 0.15 (or the one set) and 1."""
    from blendrag.bench.codecs import run_codecs
    from blendrag.bench.codecs_table import print_codecs
    from blendrag.bench.progress import bench_progress
    from blendrag.bench.ttft import BenchOptions
    from blendrag.settings import Settings

    settings = Settings.load(model=model)
    ratios = tuple(sorted({0.0, settings.recompute_ratio, 1.0}))
    options = BenchOptions(chunks, chunk_tokens, repeats, ratios, data, seed)
    _check(json)
    with interruptible("interrupted"), bench_progress() as progress:
        results = run_codecs(settings, options, progress)
    _show(results, json, print_codecs)


@app.command()
def tiers(
    chunks: _Chunks = 6,
    chunk_tokens: _ChunkTokens = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts measured, each on all tiers.")] = 9,
    ratio: Annotated[float, typer.Option(min=0.0, max=1.0, help="Recompute ratio.")] = 0.15,
    slow_disk: Annotated[int, typer.Option(min=1, help="MB/s of the disk that is slowed down.")] = 200,
    model: Model = None,
    plot: _Plot = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write what overlapped, for chrome://tracing.", metavar="FILE")
    ] = None,
    json: _Json = None,
    seed: _Seed = 0,
) -> None:
    """Time to first token by where the KV is: RAM, cold disk, slow disk, and the servers that are
    configured."""
    from blendrag.bench.plot import check_plot_path
    from blendrag.bench.progress import bench_progress
    from blendrag.bench.report import check_json_path
    from blendrag.bench.store_tables import print_tiers
    from blendrag.bench.tiers import TierBenchOptions, run_tiers
    from blendrag.bench.timeline import draw_timeline
    from blendrag.load.trace import write_trace
    from blendrag.settings import Settings

    options = TierBenchOptions(chunks, chunk_tokens, repeats, ratio, 1_000_000 * slow_disk, seed)
    settings = Settings.load(model=model)
    if plot:
        check_plot_path(plot)
    if trace:
        check_json_path(trace, "--trace")
    _check(json)
    with interruptible("interrupted"), bench_progress() as progress:
        results = run_tiers(settings, options, progress)
    _show(results, json, print_tiers)
    if trace:
        write_trace(results["traces"], trace)
    if plot:
        title = f"{chunks} chunks of {chunk_tokens} tokens, {ratio:.0%} recomputed"
        draw_timeline(results["traces"], plot, title)


@app.command()
def stream(
    questions: Annotated[int, typer.Option(min=16, help="Questions, no two over the same chunks.")] = 80,
    chunks: _Chunks = 4,
    chunk_tokens: _ChunkTokens = 256,
    pool: Annotated[int, typer.Option(min=10, help="Chunks in the store.")] = 120,
    more: Annotated[int, typer.Option(min=1, help="Chunks in the store per chunk that memory holds.")] = 10,
    ratio: Annotated[float, typer.Option(min=0.0, max=1.0, help="Recompute ratio.")] = 0.15,
    model: Model = None,
    plot: _Plot = None,
    json: _Json = None,
    seed: _Seed = 0,
) -> None:
    """A long stream of new questions over more chunks than memory holds: does the speed-up last?"""
    from blendrag.bench.plot import check_plot_path
    from blendrag.bench.progress import bench_progress
    from blendrag.bench.store_tables import print_stream
    from blendrag.bench.stream import StreamOptions, run_stream
    from blendrag.bench.stream_plot import draw_stream
    from blendrag.settings import Settings

    options = StreamOptions(questions, chunks, chunk_tokens, pool, more, ratio, seed=seed)
    settings = Settings.load(model=model)
    if plot:
        check_plot_path(plot)
    _check(json)
    with interruptible("interrupted"), bench_progress() as progress:
        results = run_stream(settings, options, progress)
    _show(results, json, print_stream)
    if plot:
        draw_stream(results, plot)


def _check(json: str | None) -> None:
    """Before measuring rather than after."""
    from blendrag.bench.report import check_json_path

    if json and json != "-":
        check_json_path(Path(json))


def _show(
    results: dict[str, Any], json: str | None, table: Callable[[dict[str, Any], Console], None]
) -> None:
    """The table, and the JSON where it is wanted: on standard output, the table goes to standard error."""
    from blendrag.bench.report import to_json, write_json

    table(results, err() if json == "-" else out())
    if json == "-":
        sys.stdout.write(to_json(results))
    elif json:
        write_json(results, Path(json))
