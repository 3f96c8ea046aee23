"""``bench ttft``, ``codecs``, ``tiers`` and ``stream``: one request after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blendrag.cli.bench.shared import Chunks, ChunkTokens, Data, Json, Plot, Ratio, Seed, app, measured
from blendrag.cli.options import Model, Selector


@app.command()
def ttft(
    chunks: Chunks = 6,
    chunk_tokens: ChunkTokens = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts measured, each with all arms.")] = 5,
    ratios: Annotated[str, typer.Option(help="Recompute ratios to measure.")] = "0.05,0.15,0.3",
    selector: Selector = None,
    model: Model = None,
    data: Data = None,
    plot: Plot = None,
    json: Json = None,
    seed: Seed = 0,
) -> None:
    """Time to first token: full prefill, vLLM's prefix caching, full reuse, and blending."""
    from blendrag.lab.bench.plot import draw
    from blendrag.lab.bench.ttft import BenchOptions, parse_ratios, run_ttft
    from blendrag.lab.report import print_table
    from blendrag.settings import Settings

    options = BenchOptions(chunks, chunk_tokens, repeats, parse_ratios(ratios), data, seed)
    settings = Settings.load(model=model, selector=selector, prefix_caching=True)
    measured(lambda progress: run_ttft(settings, options, progress), print_table, json, plot, draw)


@app.command()
def codecs(
    chunks: Chunks = 6,
    chunk_tokens: ChunkTokens = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts measured, each with all codecs.")] = 24,
    model: Model = None,
    data: Data = None,
    json: Json = None,
    seed: Seed = 0,
) -> None:
    """Codecs of stored KV: size, speed, and what each changes at ratios of 0, 0.15 (or the one set) and 1."""
    from blendrag.lab.bench.codecs import run_codecs
    from blendrag.lab.bench.codecs_table import print_codecs
    from blendrag.lab.bench.ttft import BenchOptions
    from blendrag.settings import Settings

    settings = Settings.load(model=model)
    ratios = tuple(sorted({0.0, settings.recompute_ratio, 1.0}))
    options = BenchOptions(chunks, chunk_tokens, repeats, ratios, data, seed)
    measured(lambda progress: run_codecs(settings, options, progress), print_codecs, json)


@app.command()
def tiers(
    chunks: Chunks = 6,
    chunk_tokens: ChunkTokens = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts measured, each on all tiers.")] = 9,
    ratio: Ratio = 0.15,
    slow_disk: Annotated[int, typer.Option(min=1, help="MB/s of the disk that is slowed down.")] = 200,
    model: Model = None,
    plot: Plot = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write what overlapped, for chrome://tracing.", metavar="FILE")
    ] = None,
    json: Json = None,
    seed: Seed = 0,
) -> None:
    """Time to first token by where the KV is: RAM, cold disk, slow disk, and the servers that are
    configured."""
    from blendrag.lab.bench.store_tables import print_tiers
    from blendrag.lab.bench.tiers import TierBenchOptions, run_tiers
    from blendrag.lab.bench.timeline import draw_timeline
    from blendrag.lab.report import check_json_path
    from blendrag.load.trace import write_trace
    from blendrag.settings import Settings

    options = TierBenchOptions(chunks, chunk_tokens, repeats, ratio, 1_000_000 * slow_disk, seed)
    settings = Settings.load(model=model)
    if trace:
        check_json_path(trace, "--trace")
    title = f"{chunks} chunks of {chunk_tokens} tokens, {ratio:.0%} recomputed"
    results = measured(
        lambda progress: run_tiers(settings, options, progress), print_tiers, json,
        plot, lambda results, path: draw_timeline(results["traces"], path, title),
    )  # fmt: skip
    if trace:
        write_trace(results["traces"], trace)


@app.command()
def stream(
    questions: Annotated[int, typer.Option(min=16, help="Questions, no two over the same chunks.")] = 80,
    chunks: Chunks = 4,
    chunk_tokens: ChunkTokens = 256,
    pool: Annotated[int, typer.Option(min=10, help="Chunks in the store.")] = 120,
    more: Annotated[int, typer.Option(min=1, help="Chunks in the store per chunk that memory holds.")] = 10,
    ratio: Ratio = 0.15,
    model: Model = None,
    plot: Plot = None,
    json: Json = None,
    seed: Seed = 0,
) -> None:
    """A long stream of new questions over more chunks than memory holds: does the speed-up last?"""
    from blendrag.lab.bench.store_tables import print_stream
    from blendrag.lab.bench.stream import StreamOptions, run_stream
    from blendrag.lab.bench.stream_plot import draw_stream
    from blendrag.settings import Settings

    options = StreamOptions(questions, chunks, chunk_tokens, pool, more, ratio, seed=seed)
    settings = Settings.load(model=model)
    measured(lambda progress: run_stream(settings, options, progress), print_stream, json, plot, draw_stream)
