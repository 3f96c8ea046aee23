"""``bench eviction``: what caches would have found."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from blendrag.cli.bench.shared import Json, Plot, app, measured
from blendrag.lab.progress import BenchProgress


@app.command()
def eviction(
    trace: Annotated[
        list[Path],
        typer.Option(
            help="Block trace (Mooncake), dialogues, or question set (SQuAD). Several are played in turn: one"
            " that is named twice is drawn anew.",
            metavar="FILE",
        ),
    ],
    sizes: Annotated[
        str,
        typer.Option(help="Of the cache: blocks for block traces, else tokens.", metavar="A,B,..."),
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
    warmup: Annotated[
        float, typer.Option(min=0.0, max=0.99, help="Share of the requests that is not counted.")
    ] = 0.0,
    predictor: Annotated[
        Path | None, typer.Option(help="Folder of LPC's predictor; else the user's.", metavar="FOLDER")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Of blendrag profile, for TTFT; else a modelled GPU.", metavar="FILE")
    ] = None,
    plot: Plot = None,
    json: Json = None,
) -> None:
    """Replay a trace through eviction policies: hit ratio, bytes moved, TTFT, against the optimum."""
    from blendrag.lab.replay.compare import EvictionOptions, run_eviction
    from blendrag.lab.replay.costs import Costs
    from blendrag.lab.replay.joined import in_turn
    from blendrag.lab.replay.plot import draw_eviction
    from blendrag.lab.replay.source import Workload, open_source
    from blendrag.lab.replay.table import print_eviction

    options = EvictionOptions.parse(sizes, policies, seeds, warmup)
    costs = Costs.of_profile(profile) if profile else Costs()
    workload = Workload(seconds, zipf, arrivals, predictor)
    predicted = any(name.startswith("lpc") for name in options.policies)

    def work(progress: BenchProgress) -> dict[str, Any]:
        sources = []
        for file in trace:
            progress.note(f"reading {file}")
            sources.append(open_source(file, workload, predicted=predicted))
        return run_eviction(in_turn(sources), options, costs, progress)

    measured(work, print_eviction, json, plot, draw_eviction)
