"""``bench eviction``: what caches would have found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blendrag.cli.measured import measured
from blendrag.cli.options import Json
from blendrag.progress import Progress

if TYPE_CHECKING:
    from blendrag.lab.eviction.compare import EvictionResults


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
    json: Json = False,
) -> None:
    """Replay a trace through eviction policies: hit ratios, against LRU's and the optimum."""
    from blendrag.lab.eviction.compare import EvictionOptions, print_eviction, run_eviction
    from blendrag.lab.eviction.source import RetrievalLoad, open_source

    options = EvictionOptions.parse(sizes, policies, seeds, warmup)
    load = RetrievalLoad(seconds=seconds, zipf=zipf, paths=paths, turnovers=turnovers)
    predicted = any(name.startswith("lpc") for name in options.policies)

    def work(progress: Progress) -> EvictionResults:
        progress.note(f"reading {trace}")
        return run_eviction(open_source(trace, load, arrivals, predicted=predicted), options, progress)

    measured(work, print_eviction, json)
