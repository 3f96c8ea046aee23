"""``blendrag bench``: what blending saves and costs, what caches would find, and what is recognised."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from blendrag.cli import options
from blendrag.cli.console import group, measured
from blendrag.errors import ConfigError

Chosen = TypeVar("Chosen")

_MaxTokens = Annotated[
    int | None, typer.Option(min=1, help="Tokens of every answer.", show_default="what the mode needs")
]
_Chunks = Annotated[
    int | None, typer.Option(min=2, help="Chunks in a prompt.", show_default="6; with a budget, 15")
]
_ChunkTokens = Annotated[
    int | None,
    typer.Option(min=8, help="Tokens in a chunk.", show_default="256; beside, 512; with a budget, 480"),
]
_Repeats = Annotated[
    int | None,
    typer.Option(min=1, help="How often everything is measured.", show_default="what the mode needs"),
]


def _of_mode(kind: type[Chosen], mode: str, **given: Any) -> Chosen:
    """Return a mode's options of those that were given. Raises ConfigError for one that it lacks."""
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    wanted = {name: value for name, value in given.items() if value is not None}
    for name in wanted.keys() - known:
        raise ConfigError(f"--{name.replace('_', '-')} does not go with {mode}")
    return kind(**wanted)


def ttft(
    axis: Annotated[
        str | None,
        typer.Option(help="Vary this: chunks, chunk_tokens, ratio, quality, codec, tier."),
    ] = None,
    values: Annotated[
        str | None, typer.Option(help="Values of --axis, with commas between them.", metavar="A,B,...")
    ] = None,
    speculate: Annotated[
        bool,
        typer.Option(
            "--speculate", help="Answers begun from provisional documents, by how many of these come true."
        ),
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Estimate for this GPU, here without one: H100, H200, A100, L40S, RTX 4090, MI300X.",
            metavar="NAME",
        ),
    ] = None,
    chunks: options.Chunks = 6,
    chunk_tokens: options.ChunkTokens = 512,
    repeats: _Repeats = None,
    ratios: options.Ratios = None,
    model: options.Model = None,
    plot: options.Plot = None,
    json: options.Json = False,
    paste: options.Paste = None,
    seed: options.Seed = 0,
) -> None:
    """Time to first token: full prefill, vLLM's prefix caching, exact prefixes, full reuse, and blending:
    each step of quality, or each ratio. Or against one parameter (--axis), or by counted launches, bytes and
    FLOP over a GPU's stated rates, and its own where it is (--gpu)."""
    from blendrag.lab.bench.axes import AXES, axis_named, parse_ratios
    from blendrag.lab.bench.model import ModelOptions, print_model, run_model
    from blendrag.lab.bench.speculate import SpeculateOptions, print_speculate, run_speculate
    from blendrag.lab.bench.ttft import TtftOptions, run_ttft
    from blendrag.lab.bench.ttft_report import draw_sweep, draw_ttft, print_sweep, print_ttft
    from blendrag.settings import PREFIX_CACHING, Settings

    if gpu is not None:
        others = {"axis": axis, "values": values, "ratios": ratios, "repeats": repeats, "model": model}
        estimated = _of_mode(ModelOptions, "--gpu", gpu=gpu, plot=plot, paste=paste, **others)
        measured(lambda _: run_model(estimated), print_model, json)
        return
    settings = Settings.load(model=model, engine_args=PREFIX_CACHING)
    common = {"chunks": chunks, "chunk_tokens": chunk_tokens, "repeats": repeats, "seed": seed}
    if speculate:
        early = _of_mode(
            SpeculateOptions, "--speculate", **common, axis=axis, values=values, ratios=ratios, plot=plot
        )
        measured(
            lambda bar: run_speculate(settings, early, bar),
            print_speculate,
            json,
            paste=paste,
            name="speculate",
        )
        return
    if axis is None and values is None:
        chosen = AXES["quality" if ratios is None else "ratio"]
        at = chosen.values(None, settings) if ratios is None else parse_ratios(ratios)
        table, draw, name = print_ttft, draw_ttft, "ttft"
    elif ratios is None:
        chosen = axis_named(axis or "chunks")
        at = chosen.values(values, settings)
        table, draw, name = print_sweep, draw_sweep, f"ttft-{chosen.name}"
    else:
        raise ConfigError("--ratios does not go with --axis: give --axis ratio --values")
    all_arms = name == "ttft"
    wanted = _of_mode(TtftOptions, "", axis=chosen.name, values=at, exact=all_arms, **common)
    measured(lambda bar: run_ttft(settings, wanted, bar), table, json, plot, draw, paste=paste, name=name)


def load(
    beside: Annotated[
        bool,
        typer.Option("--beside", help="Measure what running answers, and a short prompt, lose to long ones."),
    ] = False,
    kv_budget: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Measure what is saved by decoding from so many tokens of KV a head.",
            metavar="TOKENS",
        ),
    ] = None,
    chunks: _Chunks = None,
    chunk_tokens: _ChunkTokens = None,
    pool: Annotated[int | None, typer.Option(min=2, help="Chunks in the store.", show_default="48")] = None,
    max_tokens: _MaxTokens = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=1.0, help="Seconds of arrivals, for each arm and rate.", show_default="24"),
    ] = None,
    tries: Annotated[
        int | None,
        typer.Option(
            min=1, help="How many rates are tried per arm, around what it can do.", show_default="5"
        ),
    ] = None,
    answers: Annotated[
        int | None,
        typer.Option(min=2, help="With a budget: answers at once, besides one alone.", show_default="8"),
    ] = None,
    repeats: _Repeats = None,
    model: options.Model = None,
    plot: options.Plot = None,
    json: options.Json = False,
    paste: options.Paste = None,
    seed: options.Seed = 0,
) -> None:
    """Throughput: how many requests a second each arm answers before the time to first token gets long. Or
    what requests lose beside each other (--beside), or what a budget of KV saves (--kv-budget)."""
    from blendrag.lab.bench.beside import BesideOptions, run_beside
    from blendrag.lab.bench.decode import DecodeOptions, print_decode, run_decode
    from blendrag.lab.bench.load import LoadOptions, run_load
    from blendrag.lab.bench.load_report import draw_beside, draw_load, print_beside, print_load
    from blendrag.settings import PREFIX_CACHING, Settings

    given: dict[str, Any] = {
        "chunks": chunks, "chunk_tokens": chunk_tokens, "pool": pool, "max_tokens": max_tokens,
        "seconds": seconds, "tries": tries, "answers": answers, "repeats": repeats, "seed": seed,
    }  # fmt: skip
    evicts = {} if kv_budget is None else {"kv_budget": kv_budget, "blend_share": 1.0}
    settings = Settings.load(model=model, engine_args=PREFIX_CACHING, **evicts)
    if beside:
        windows = _of_mode(BesideOptions, "--beside", kv_budget=kv_budget, **given)
        measured(
            lambda bar: run_beside(settings, windows, bar),
            print_beside, json, plot, draw_beside, paste=paste, name="beside",
        )  # fmt: skip
    elif kv_budget is not None:
        budget = _of_mode(DecodeOptions, "--kv-budget", kv_budget=kv_budget, plot=plot, **given)
        measured(
            lambda bar: run_decode(settings, budget, bar), print_decode, json, paste=paste, name="decode"
        )
    else:
        wanted = _of_mode(LoadOptions, "requests that arrive (--beside and --kv-budget have it)", **given)
        measured(
            lambda bar: run_load(settings, wanted, bar),
            print_load, json, plot, draw_load, paste=paste, name="load",
        )  # fmt: skip


def tree(
    data: Annotated[Path, typer.Option(help="Questions in SQuAD's format.", metavar="FILE")],
    arrivals: Annotated[
        Path | None, typer.Option(help="Times of the questions (Azure); else Poisson.", metavar="FILE")
    ] = None,
    articles: Annotated[int, typer.Option(min=1, help="How many articles of the data are used.")] = 3,
    chunk_tokens: Annotated[int, typer.Option(min=8, help="Tokens of a document, at most.")] = 128,
    top_k: Annotated[int, typer.Option(min=2, help="Documents in a prompt.")] = 5,
    zipf: Annotated[float, typer.Option(min=0.0, help="Popularity of questions: rank**-zipf.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Ask each question once, instead of popular ones often.")
    ] = False,
    earlier: Annotated[int, typer.Option(min=0, help="Questions that came before.")] = 2000,
    pool: Annotated[int, typer.Option(min=128, help="Tokens in vLLM's prefix cache.")] = 2048,
    room: Annotated[int, typer.Option("--tree", min=128, help="Tokens in a tree.")] = 16384,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of every answer.")] = 8,
    alone: Annotated[int, typer.Option(min=2, help="Questions one after another.")] = 12,
    requests: Annotated[int, typer.Option(min=4, help="Requests at each rate, about.")] = 20,
    tries: Annotated[int, typer.Option(min=1, help="How many rates of requests are tried.")] = 3,
    arms: Annotated[
        str | None,
        typer.Option(help="full, prefix, tree, blended, unmixed, both; else all.", metavar="A,B,..."),
    ] = None,
    model: options.Model = None,
    plot: options.Plot = None,
    json: options.Json = False,
    paste: options.Paste = None,
    seed: options.Seed = 0,
) -> None:
    """Measure what a tree of exact prefixes saves on questions that come again, with and without blending."""
    from blendrag.lab.bench.load_report import draw_load, print_tree
    from blendrag.lab.bench.tree import ARMS, TreeOptions, run_tree
    from blendrag.settings import PREFIX_CACHING, Settings

    wanted = TreeOptions(
        data, arrivals, articles, chunk_tokens, top_k, None if once else zipf, earlier, pool, room,
        max_tokens, alone, requests, tries, ARMS if arms is None else tuple(arms.split(",")), seed,
    )  # fmt: skip
    settings = Settings.load(model=model, engine_args=PREFIX_CACHING)
    measured(
        lambda bar: run_tree(settings, wanted, bar),
        print_tree, json, plot, draw_load, paste=paste, name="tree",
    )  # fmt: skip


def eviction(
    trace: Annotated[
        Path,
        typer.Option(
            help="Block trace (Mooncake), your own log, dialogues, or question set (SQuAD).", metavar="FILE"
        ),
    ],
    sizes: Annotated[
        str,
        typer.Option(help="Sizes of the cache: blocks for block traces, else tokens.", metavar="A,B,..."),
    ],
    policies: Annotated[
        str | None, typer.Option(help="lru, lfu, gdsf, pgdsf, lpc, lpc+; else all.", metavar="A,B,...")
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Traces made of dialogues or questions, each replayed.")
    ] = 5,
    seconds: Annotated[float, typer.Option(min=1.0, help="Length of a trace that is made.")] = 1200.0,
    zipf: Annotated[float, typer.Option(min=0.0, help="Popularity of questions: rank**-zipf.")] = 1.0,
    arrivals: Annotated[
        Path | None, typer.Option(help="Times of the questions (Azure); else Poisson.", metavar="FILE")
    ] = None,
    paths: Annotated[
        bool, typer.Option("--paths", help="A chunk is found behind the same chunks only, as in a tree.")
    ] = False,
    turnovers: Annotated[
        int, typer.Option(min=0, help="How often other questions become the popular ones.")
    ] = 0,
    warmup: Annotated[
        float, typer.Option(min=0.0, max=0.99, help="Share of the requests that is not counted.")
    ] = 0.0,
    json: options.Json = False,
) -> None:
    """Replay a trace through eviction policies: hit ratios, against LRU's and the optimum."""
    from blendrag.lab.eviction.compare import EvictionOptions, print_eviction, run_eviction
    from blendrag.lab.eviction.source import RetrievalLoad, open_source

    wanted = EvictionOptions.parse(sizes, policies, seeds, warmup)
    load = RetrievalLoad(seconds=seconds, zipf=zipf, paths=paths, turnovers=turnovers)
    predicted = any(name.startswith("lpc") for name in wanted.policies)
    measured(
        lambda bar: run_eviction(open_source(trace, load, arrivals, predicted=predicted), wanted, bar),
        print_eviction,
        json,
    )


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


app = group(help="Measure on this machine.")
for command in (ttft, load, tree, eviction, recognition):
    app.command()(command)
