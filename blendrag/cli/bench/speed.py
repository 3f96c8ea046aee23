"""``bench ttft``, ``sweep``, ``load``, ``beside``, ``kernels`` and ``context``: what blending saves, what it
costs others, and where both come from."""

from __future__ import annotations

from typing import Annotated

import typer

from blendrag.cli.bench.shared import (
    Chunks,
    ChunkTokens,
    Data,
    Paste,
    Plot,
    Ratio,
    Seed,
    app,
    measured,
)
from blendrag.cli.options import Json, Model, Selector

_RATIOS = "0.05,0.15,0.3"


@app.command()
def ttft(
    chunks: Chunks = 6,
    chunk_tokens: ChunkTokens = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts measured, each with all arms.")] = 5,
    ratios: Annotated[
        str | None,
        typer.Option(help="Recompute ratios to measure, instead of the steps of quality."),
    ] = None,
    selector: Selector = None,
    model: Model = None,
    data: Data = None,
    plot: Plot = None,
    json: Json = False,
    paste: Paste = None,
    seed: Seed = 0,
) -> None:
    """Time to first token: full prefill, vLLM's prefix caching, full reuse, and blending: each step of
    quality, or each ratio."""
    from blendrag.lab.bench.axes import AXES, parse_ratios
    from blendrag.lab.bench.ttft import TtftOptions, run_ttft
    from blendrag.lab.bench.ttft_report import draw_ttft, print_ttft
    from blendrag.settings import Settings

    settings = Settings.load(model=model, selector=selector, prefix_caching=True)
    by_step = ratios is None and selector is None
    axis = AXES["quality" if by_step else "ratio"]
    values = axis.values(None, settings) if by_step else parse_ratios(_RATIOS if ratios is None else ratios)
    options = TtftOptions(axis, values, chunks, chunk_tokens, repeats, data, seed, ingest=True)
    measured(
        lambda progress: run_ttft(settings, options, progress), print_ttft, json, plot, draw_ttft,
        paste=("ttft", paste),
    )  # fmt: skip


@app.command()
def sweep(
    axis: Annotated[
        str,
        typer.Option(
            help="What is varied: chunks, chunk_tokens, ratio, quality, question_tokens, batch, codec, tier."
        ),
    ] = "chunks",
    values: Annotated[
        str | None, typer.Option(help="Its values, with commas between them.", metavar="A,B,...")
    ] = None,
    chunks: Chunks = 6,
    chunk_tokens: ChunkTokens = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts per value, each with all arms.")] = 4,
    model: Model = None,
    data: Data = None,
    plot: Plot = None,
    json: Json = False,
    paste: Paste = None,
    seed: Seed = 0,
) -> None:
    """Time to first token against one parameter: full prefill, prefix caching, full reuse, blending."""
    from blendrag.lab.bench.axes import axis_named
    from blendrag.lab.bench.ttft import TtftOptions, run_ttft
    from blendrag.lab.bench.ttft_report import draw_sweep, print_sweep
    from blendrag.settings import Settings

    settings = Settings.load(model=model, prefix_caching=True)
    varied = axis_named(axis)
    chosen = varied.values(values, settings)
    options = TtftOptions(varied, chosen, chunks, chunk_tokens, repeats, data, seed)
    measured(
        lambda progress: run_ttft(settings, options, progress), print_sweep, json, plot, draw_sweep,
        paste=(f"sweep-{axis}", paste),
    )  # fmt: skip


@app.command()
def load(
    chunks: Chunks = 6,
    chunk_tokens: ChunkTokens = 256,
    pool: Annotated[int, typer.Option(min=2, help="Chunks in the store.")] = 48,
    questions: Annotated[int, typer.Option(min=1, help="Different prompts.")] = 40,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of every answer.")] = 16,
    seconds: Annotated[float, typer.Option(min=1.0, help="Of arrivals, for each arm and rate.")] = 24.0,
    rates: Annotated[
        str | None,
        typer.Option(help="Requests a second; else some about what each arm can do.", metavar="A,B,..."),
    ] = None,
    tries: Annotated[int, typer.Option(min=1, help="Rates per arm, where none are given.")] = 5,
    bound_ms: Annotated[
        float | None,
        typer.Option(min=1.0, help="Of p95 TTFT; else twice full prefill's without load."),
    ] = None,
    model: Model = None,
    plot: Plot = None,
    json: Json = False,
    paste: Paste = None,
    seed: Seed = 0,
) -> None:
    """Throughput: how many requests a second each arm answers before the time to first token gets long."""
    from blendrag.lab.bench.load import LoadOptions, parse_rates, run_load
    from blendrag.lab.bench.load_report import draw_load, print_load
    from blendrag.settings import Settings

    options = LoadOptions(
        chunks, chunk_tokens, pool, questions, max_tokens, seconds,
        parse_rates(rates) if rates else (), tries, bound_ms, seed,
    )  # fmt: skip
    settings = Settings.load(model=model, prefix_caching=True)
    measured(
        lambda progress: run_load(settings, options, progress), print_load, json, plot, draw_load,
        paste=("load", paste),
    )  # fmt: skip


@app.command()
def beside(
    decodes: Annotated[int, typer.Option(min=1, help="Answers that run all the time.")] = 2,
    decode_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each of them.")] = 200,
    chunks: Chunks = 6,
    chunk_tokens: ChunkTokens = 512,
    arrivals: Annotated[int, typer.Option(min=1, help="Long prompts that come, per repeat.")] = 3,
    gap: Annotated[
        float | None,
        typer.Option(min=0.01, help="Seconds between them; else a little more than a full prefill takes."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Of each of what is beside.")] = 2,
    model: Model = None,
    plot: Plot = None,
    json: Json = False,
    paste: Paste = None,
    seed: Seed = 0,
) -> None:
    """Inter-token latency of running answers beside full prefills, beside blends and beside ingest."""
    from blendrag.lab.bench.beside import BesideOptions, run_beside
    from blendrag.lab.bench.load_report import draw_beside, print_beside
    from blendrag.settings import Settings

    options = BesideOptions(decodes, decode_tokens, chunks, chunk_tokens, arrivals, gap, repeats, seed)
    settings = Settings.load(model=model, prefix_caching=True)
    measured(
        lambda progress: run_beside(settings, options, progress), print_beside, json, plot, draw_beside,
        paste=("beside", paste),
    )  # fmt: skip


@app.command()
def kernels(
    chunks: Chunks = 6,
    chunk_tokens: ChunkTokens = 512,
    ratio: Ratio = 0.15,
    repeats: Annotated[int, typer.Option(min=1, help="How often each piece of a layer is timed.")] = 20,
    model: Model = None,
    json: Json = False,
    paste: Paste = None,
    seed: Seed = 0,
) -> None:
    """One layer's pieces (select, rotate, attention, projections, MLP, ...) against this machine's limits."""
    from blendrag.lab.bench.kernels import KernelOptions, run_kernels
    from blendrag.lab.bench.kernels_report import print_kernels
    from blendrag.settings import Settings

    options = KernelOptions(chunks, chunk_tokens, ratio, repeats, seed)
    settings = Settings.load(model=model)
    measured(
        lambda progress: run_kernels(settings, options, progress), print_kernels, json,
        paste=("kernels", paste),
    )  # fmt: skip


@app.command()
def context(
    texts: Annotated[int, typer.Option(min=3, help="Texts that a chunk is taken from.")] = 16,
    chunk_tokens: ChunkTokens = 256,
    before: Annotated[int, typer.Option(min=1, help="Tokens of other text before it in a prompt.")] = 1024,
    model: Model = None,
    data: Data = None,
    plot: Plot = None,
    json: Json = False,
    paste: Paste = None,
) -> None:
    """How far a chunk's KV is from what it is behind other documents, by what it was prefilled behind."""
    from blendrag.lab.bench.context import ContextOptions, draw_context, print_context, run_context
    from blendrag.settings import Settings

    options = ContextOptions(texts, chunk_tokens, before, data)
    settings = Settings.load(model=model)
    measured(
        lambda progress: run_context(settings, options, progress), print_context, json, plot, draw_context,
        paste=("context", paste),
    )  # fmt: skip
