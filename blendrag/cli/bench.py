"""``blendrag bench``: what blending saves and costs, what caches would find, and what is recognised."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import MISSING, fields, replace
from inspect import Parameter
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from blendrag.cli import options
from blendrag.cli.console import group, measured
from blendrag.errors import ConfigError
from blendrag.lab.options import (
    BesideOptions,
    DecodeOptions,
    EvictionOptions,
    LoadOptions,
    ModelOptions,
    RecognitionOptions,
    SpeculateOptions,
    TreeOptions,
    TtftOptions,
)

Chosen = TypeVar("Chosen")


def _with_options(*modes: Any) -> Callable[[options.Command], options.Command]:
    """Decorate a command whose last parameter is ``**given``: it takes the options of these dataclasses. Of
    several, each a mode of the command, an option is None unless it was given."""

    def decorate(command: options.Command) -> options.Command:
        parameters = []
        hints = {
            name: hint for mode in modes for name, hint in get_type_hints(mode, include_extras=True).items()
        }
        for name, hint in hints.items():
            kind, *told = get_args(hint) if get_origin(hint) is Annotated else (hint,)
            if not told:
                continue  # what the command makes itself
            defaults = {f.default: None for mode in modes for f in fields(mode) if f.name == name}
            default, flag = next(iter(defaults)), copy(told[0])
            if len(modes) > 1:
                shown = [str(each) for each in defaults if each is not MISSING]
                flag.show_default = f"{', '.join(shown)}{' by mode' if shown[1:] else ''}" if shown else False
                kind, default = kind | None, None
            given = Parameter(name, Parameter.KEYWORD_ONLY, annotation=Annotated[kind, flag])
            parameters.append(given if default is MISSING else given.replace(default=default))
        return options.with_parameters(command, parameters)

    return decorate


def _of_mode(kind: type[Chosen], mode: str, **given: Any) -> Chosen:
    """Return a mode's options of those that were given. Raises ConfigError for one that it lacks."""
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    wanted = {name: value for name, value in given.items() if value is not None}
    for name in wanted.keys() - known:
        raise ConfigError(f"--{name.replace('_', '-')} does not go with {mode}")
    return kind(**wanted)


@_with_options(TtftOptions, SpeculateOptions, ModelOptions)
def ttft(
    axis: Annotated[
        str | None,
        typer.Option(help="Vary this: chunks, chunk_tokens, ratio, quality, codec, tier."),
    ] = None,
    values: Annotated[
        str | None, typer.Option(help="Values of --axis, with commas between them.", metavar="A,B,...")
    ] = None,
    ratios: options.Ratios = None,
    speculate: Annotated[
        bool,
        typer.Option(
            "--speculate", help="Answers begun from provisional documents, by how many of these come true."
        ),
    ] = False,
    model: options.Model = None,
    plot: options.Plot = None,
    json: options.Json = False,
    paste: options.Paste = None,
    **given: Any,
) -> None:
    """Measure the time to first token of full prefill, prefix caching, exact prefixes, reuse and blending.

    Of blending, each step of quality or each ratio; or against one parameter (--axis). --gpu estimates it by
    counted launches, bytes and FLOP over a GPU's stated rates, and measured ones where it is."""
    from blendrag.lab.bench.axes import AXES, axis_named, parse_ratios
    from blendrag.lab.bench.model import run_model
    from blendrag.lab.bench.speculate import run_speculate
    from blendrag.lab.bench.ttft import run_ttft
    from blendrag.settings import PREFIX_CACHING, Settings

    swept = {"axis": axis, "values": values, "ratios": ratios}
    if given["gpu"] is not None:
        estimated = _of_mode(ModelOptions, "--gpu", model=model, plot=plot, paste=paste, **swept, **given)
        measured(lambda _: run_model(estimated), json)
        return
    settings = Settings.load(model=model, engine_args=PREFIX_CACHING)
    if speculate:
        early = _of_mode(SpeculateOptions, "--speculate", plot=plot, **swept, **given)
        measured(lambda bar: run_speculate(settings, early, bar), json, "speculate", paste=paste)
        return
    if axis is None and values is None:
        chosen = AXES["quality" if ratios is None else "ratio"]
        at = chosen.values(None, settings) if ratios is None else parse_ratios(ratios)
        name = "ttft"
    elif ratios is None:
        chosen = axis_named(axis or "chunks")
        at = chosen.values(values, settings)
        name = f"ttft-{chosen.name}"
    else:
        raise ConfigError("--ratios does not go with --axis: give --axis ratio --values")
    wanted = _of_mode(TtftOptions, "", axis=chosen.name, values=at, exact=name == "ttft", **given)
    measured(lambda bar: run_ttft(settings, wanted, bar), json, name, plot, paste)


@_with_options(LoadOptions, BesideOptions, DecodeOptions)
def load(
    beside: Annotated[
        bool,
        typer.Option("--beside", help="Measure what running answers, and a short prompt, lose to long ones."),
    ] = False,
    model: options.Model = None,
    plot: options.Plot = None,
    json: options.Json = False,
    paste: options.Paste = None,
    **given: Any,
) -> None:
    """Measure how many requests a second each arm answers before the time to first token gets long.

    Or what requests lose beside each other (--beside), or what a budget of KV saves (--kv-budget)."""
    from blendrag.lab.bench.beside import run_beside
    from blendrag.lab.bench.decode import run_decode
    from blendrag.lab.bench.load import run_load
    from blendrag.settings import PREFIX_CACHING, Settings

    kv_budget = given["kv_budget"]
    evicts = {} if kv_budget is None else {"kv_budget": kv_budget, "blend_share": 1.0}
    settings = Settings.load(model=model, engine_args=PREFIX_CACHING, **evicts)
    if beside:
        windows = _of_mode(BesideOptions, "--beside", **given)
        measured(lambda bar: run_beside(settings, windows, bar), json, "beside", plot, paste)
    elif kv_budget is not None:
        budget = _of_mode(DecodeOptions, "--kv-budget", plot=plot, **given)
        measured(lambda bar: run_decode(settings, budget, bar), json, "decode", paste=paste)
    else:
        wanted = _of_mode(LoadOptions, "requests that arrive (--beside and --kv-budget have it)", **given)
        measured(lambda bar: run_load(settings, wanted, bar), json, "load", plot, paste)


@_with_options(TreeOptions)
def tree(
    once: Annotated[
        bool, typer.Option("--once", help="Ask each question once, instead of popular ones often.")
    ] = False,
    arms: Annotated[
        str | None,
        typer.Option(help="full, prefix, tree, blended, unmixed, both; else all.", metavar="A,B,..."),
    ] = None,
    model: options.Model = None,
    plot: options.Plot = None,
    json: options.Json = False,
    paste: options.Paste = None,
    **given: Any,
) -> None:
    """Measure what a tree of exact prefixes saves on questions that come again, with and without blending."""
    from blendrag.lab.bench.tree import run_tree
    from blendrag.settings import PREFIX_CACHING, Settings

    wanted = TreeOptions(**given)
    if once:
        wanted = replace(wanted, zipf=None)
    if arms is not None:
        wanted = replace(wanted, arms=tuple(arms.split(",")))
    settings = Settings.load(model=model, engine_args=PREFIX_CACHING)
    measured(lambda bar: run_tree(settings, wanted, bar), json, "tree", plot, paste)


@_with_options(EvictionOptions)
def eviction(json: options.Json = False, **given: Any) -> None:
    """Replay a trace through eviction policies, and compare their hit ratios with LRU's and the optimum."""
    from blendrag.lab.eviction.compare import run_eviction
    from blendrag.lab.eviction.source import open_source

    wanted = EvictionOptions(**given)
    measured(lambda bar: run_eviction(open_source(wanted), wanted, bar), json)


@_with_options(RecognitionOptions)
def recognition(
    model: options.Model = None, json: options.Json = False, paste: options.Paste = None, **given: Any
) -> None:
    """Replay prompts as applications make them, and count what is recognised though nobody names documents.

    Also measures how long one prompt is searched. Starts no engine."""
    from blendrag.lab.bench.recognition import run_recognition
    from blendrag.settings import Settings

    wanted, settings = RecognitionOptions(**given), Settings.load(model=model)
    measured(lambda bar: run_recognition(settings, wanted, bar), json, "recognition", paste=paste)


app = group(help="Measure blending and caching on this machine.")
for command in (ttft, load, tree, eviction, recognition):
    app.command()(command)
