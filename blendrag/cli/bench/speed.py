"""All of ``bench`` but ``eviction``: what blending saves, what it costs others, and where both come from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blendrag.cli import options
from blendrag.cli.measured import measured


def ttft(
    chunks: options.Chunks = 6,
    chunk_tokens: options.ChunkTokens = 512,
    repeats: options.Repeats = 5,
    ratios: options.Ratios = None,
    model: options.Model = None,
    data: options.Data = None,
    plot: options.Plot = None,
    json: options.Json = False,
    paste: options.Paste = None,
    seed: options.Seed = 0,
) -> None:
    """Time to first token: full prefill, vLLM's prefix caching, exact prefixes, full reuse, and blending:
    each step of quality, or each ratio."""
    from blendrag.lab.bench.axes import AXES, parse_ratios
    from blendrag.lab.bench.ttft import TtftOptions, run_ttft
    from blendrag.lab.bench.ttft_report import draw_ttft, print_ttft
    from blendrag.lab.report import pasted
    from blendrag.settings import PREFIX_CACHING, Settings

    settings = Settings.load(model=model, engine_args=PREFIX_CACHING)
    axis = AXES["quality" if ratios is None else "ratio"]
    values = axis.values(None, settings) if ratios is None else parse_ratios(ratios)
    wanted = TtftOptions(
        axis.name, values, chunks, chunk_tokens, repeats, data, seed, ingest=True, exact=True
    )
    table = pasted(print_ttft, "ttft", paste)
    measured(lambda progress: run_ttft(settings, wanted, progress), table, json, plot, draw_ttft)


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
    chunks: options.Chunks = 6,
    chunk_tokens: options.ChunkTokens = 512,
    repeats: options.Repeats = 4,
    model: options.Model = None,
    data: options.Data = None,
    plot: options.Plot = None,
    json: options.Json = False,
    paste: options.Paste = None,
    seed: options.Seed = 0,
) -> None:
    """Time to first token against one parameter: full prefill, prefix caching, full reuse, blending."""
    from blendrag.lab.bench.axes import axis_named
    from blendrag.lab.bench.ttft import TtftOptions, run_ttft
    from blendrag.lab.bench.ttft_report import draw_sweep, print_sweep
    from blendrag.lab.report import pasted
    from blendrag.settings import PREFIX_CACHING, Settings

    settings = Settings.load(model=model, engine_args=PREFIX_CACHING)
    chosen = axis_named(axis).values(values, settings)
    wanted = TtftOptions(axis, chosen, chunks, chunk_tokens, repeats, data, seed)
    table = pasted(print_sweep, f"sweep-{axis}", paste)
    measured(lambda progress: run_ttft(settings, wanted, progress), table, json, plot, draw_sweep)


def load(
    chunks: options.Chunks = 6,
    chunk_tokens: options.ChunkTokens = 256,
    pool: Annotated[int, typer.Option(min=2, help="Chunks in the store.")] = 48,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of every answer.")] = 16,
    seconds: Annotated[float, typer.Option(min=1.0, help="Of arrivals, for each arm and rate.")] = 24.0,
    tries: Annotated[int, typer.Option(min=1, help="Rates per arm, about what it can do.")] = 5,
    model: options.Model = None,
    plot: options.Plot = None,
    json: options.Json = False,
    paste: options.Paste = None,
    seed: options.Seed = 0,
) -> None:
    """Throughput: how many requests a second each arm answers before the time to first token gets long."""
    from blendrag.lab.bench.load import LoadOptions, run_load
    from blendrag.lab.bench.load_report import draw_load, print_load
    from blendrag.lab.report import pasted
    from blendrag.settings import PREFIX_CACHING, Settings

    wanted = LoadOptions(chunks, chunk_tokens, pool, max_tokens, seconds, tries, seed)
    settings = Settings.load(model=model, engine_args=PREFIX_CACHING)
    table = pasted(print_load, "load", paste)
    measured(lambda progress: run_load(settings, wanted, progress), table, json, plot, draw_load)


def beside(
    chunks: options.Chunks = 6,
    chunk_tokens: options.ChunkTokens = 512,
    arrivals: Annotated[int, typer.Option(min=1, help="Long prompts that come, per repeat.")] = 3,
    repeats: options.Repeats = 2,
    model: options.Model = None,
    plot: options.Plot = None,
    json: options.Json = False,
    paste: options.Paste = None,
    seed: options.Seed = 0,
) -> None:
    """Inter-token latency of running answers beside full prefills, beside blends and beside ingest."""
    from blendrag.lab.bench.beside import BesideOptions, run_beside
    from blendrag.lab.bench.load_report import draw_beside, print_beside
    from blendrag.lab.report import pasted
    from blendrag.settings import PREFIX_CACHING, Settings

    wanted = BesideOptions(chunks, chunk_tokens, arrivals, repeats, seed)
    settings = Settings.load(model=model, engine_args=PREFIX_CACHING)
    table = pasted(print_beside, "beside", paste)
    measured(lambda progress: run_beside(settings, wanted, progress), table, json, plot, draw_beside)


def speculate(
    chunks: options.Chunks = 6,
    chunk_tokens: options.ChunkTokens = 512,
    repeats: options.Repeats = 16,
    model: options.Model = None,
    json: options.Json = False,
    paste: options.Paste = None,
    seed: options.Seed = 0,
) -> None:
    """What it saves to begin answers from provisional documents, by how many of their lists come true."""
    from blendrag.lab.bench.speculate import SpeculateOptions, print_speculate, run_speculate
    from blendrag.lab.report import pasted
    from blendrag.settings import PREFIX_CACHING, Settings

    wanted = SpeculateOptions(chunks, chunk_tokens, repeats=repeats, seed=seed)
    settings = Settings.load(model=model, engine_args=PREFIX_CACHING)
    table = pasted(print_speculate, "speculate", paste)
    measured(lambda progress: run_speculate(settings, wanted, progress), table, json)


def decode(
    chunks: options.Chunks = 15,
    chunk_tokens: options.ChunkTokens = 480,
    budget: Annotated[int, typer.Option(min=1, help="Tokens of KV that a head keeps, on average.")] = 512,
    answers: Annotated[int, typer.Option(min=2, help="At once, besides one alone.")] = 8,
    tokens: Annotated[int, typer.Option(min=4, help="Tokens of every answer.")] = 48,
    repeats: options.Repeats = 2,
    model: options.Model = None,
    json: options.Json = False,
    paste: options.Paste = None,
    seed: options.Seed = 0,
) -> None:
    """Time per token and KV held: decoded from all of a prompt's KV, and from a budget of it."""
    from blendrag.lab.bench.decode import DecodeOptions, print_decode, run_decode
    from blendrag.lab.report import pasted
    from blendrag.settings import PREFIX_CACHING, Settings

    wanted = DecodeOptions(chunks, chunk_tokens, budget, answers, tokens, repeats, seed)
    settings = Settings.load(model=model, engine_args=PREFIX_CACHING, kv_budget=budget, blend_share=1.0)
    table = pasted(print_decode, "decode", paste)
    measured(lambda progress: run_decode(settings, wanted, progress), table, json)


def kernels(
    chunks: options.Chunks = 6,
    chunk_tokens: options.ChunkTokens = 512,
    ratio: Annotated[float, typer.Option(min=0.0, max=1.0, help="Recompute ratio.")] = 0.15,
    repeats: options.Repeats = 20,
    model: options.Model = None,
    json: options.Json = False,
    paste: options.Paste = None,
    seed: options.Seed = 0,
) -> None:
    """One layer's pieces (select, rotate, attention, projections, MLP, ...) against this machine's limits."""
    from blendrag.lab.bench.kernels import KernelOptions, print_kernels, run_kernels
    from blendrag.lab.report import pasted
    from blendrag.settings import Settings

    wanted = KernelOptions(chunks, chunk_tokens, ratio, repeats, seed)
    settings = Settings.load(model=model)
    table = pasted(print_kernels, "kernels", paste)
    measured(lambda progress: run_kernels(settings, wanted, progress), table, json)


def context(
    texts: Annotated[int, typer.Option(min=3, help="Texts that a chunk is taken from.")] = 16,
    chunk_tokens: options.ChunkTokens = 256,
    before: Annotated[int, typer.Option(min=1, help="Tokens of other text before it in a prompt.")] = 1024,
    model: options.Model = None,
    data: options.Data = None,
    plot: options.Plot = None,
    json: options.Json = False,
    paste: options.Paste = None,
) -> None:
    """How far a chunk's KV is from what it is behind other documents, by what it was prefilled behind."""
    from blendrag.lab.bench.context import ContextOptions, draw_context, print_context, run_context
    from blendrag.lab.report import pasted
    from blendrag.settings import Settings

    wanted = ContextOptions(texts, chunk_tokens, before, data)
    settings = Settings.load(model=model)
    table = pasted(print_context, "context", paste)
    measured(lambda progress: run_context(settings, wanted, progress), table, json, plot, draw_context)


def tree(
    data: Annotated[Path, typer.Option(help="Questions in SQuAD's format.", metavar="FILE")],
    arrivals: Annotated[
        Path | None, typer.Option(help="Times of the questions (Azure); else Poisson.", metavar="FILE")
    ] = None,
    articles: Annotated[int, typer.Option(min=1, help="Of the data, the first.")] = 3,
    chunk_tokens: Annotated[int, typer.Option(min=8, help="Tokens of a document, at most.")] = 128,
    top_k: Annotated[int, typer.Option(min=2, help="Documents in a prompt.")] = 5,
    zipf: Annotated[float, typer.Option(min=0.0, help="Popularity of questions: rank**-zipf.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Ask each question once instead.")] = False,
    earlier: Annotated[int, typer.Option(min=0, help="Questions that came before.")] = 2000,
    pool: Annotated[int, typer.Option(min=128, help="Tokens in vLLM's prefix cache.")] = 2048,
    room: Annotated[int, typer.Option("--tree", min=128, help="Tokens in a tree.")] = 16384,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of every answer.")] = 8,
    alone: Annotated[int, typer.Option(min=2, help="Questions one after another.")] = 12,
    requests: Annotated[int, typer.Option(min=4, help="At each rate, about.")] = 20,
    tries: Annotated[int, typer.Option(min=1, help="Rates.")] = 3,
    arms: Annotated[
        str | None,
        typer.Option(
            help="full, prefix, reordered, tree, blended, unmixed, both; else all.", metavar="A,B,..."
        ),
    ] = None,
    model: options.Model = None,
    plot: options.Plot = None,
    json: options.Json = False,
    paste: options.Paste = None,
    seed: options.Seed = 0,
) -> None:
    """What a tree of exact prefixes saves, without blending and beside it, on questions that come again."""
    from blendrag.lab.bench.load_report import draw_load, print_tree
    from blendrag.lab.bench.tree import ARMS, TreeOptions, run_tree
    from blendrag.lab.report import pasted
    from blendrag.settings import PREFIX_CACHING, Settings

    chosen = ARMS if arms is None else tuple(arms.split(","))
    wanted = TreeOptions(
        data,
        arrivals,
        articles=articles,
        chunk_tokens=chunk_tokens,
        top_k=top_k,
        zipf=None if once else zipf,
        earlier=earlier,
        pool=pool,
        tree=room,
        max_tokens=max_tokens,
        alone=alone,
        requests=requests,
        tries=tries,
        arms=chosen,
        seed=seed,
    )
    settings = Settings.load(model=model, engine_args=PREFIX_CACHING)
    table = pasted(print_tree, "tree", paste)
    measured(lambda progress: run_tree(settings, wanted, progress), table, json, plot, draw_load)
