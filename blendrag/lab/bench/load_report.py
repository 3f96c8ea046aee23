"""Tables and pictures of ``bench load``, beside others, too, and of ``bench tree``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from blendrag.lab import canvas
from blendrag.lab.bench.beside import DECODES, INTO_S, SLOW_MB_S, BesideResults
from blendrag.lab.bench.load import PROMPTS, LoadResults
from blendrag.lab.bench.open_loop import LoadArm
from blendrag.lab.bench.tree import TreeResults
from blendrag.lab.canvas import ARM_COLOURS, ARM_LABELS, INK
from blendrag.lab.results import where
from blendrag.tables import table_with

_ROOM = 2.5  # of the bound: what is above is out of the picture, being a queue that only grows
_COLOURS = {
    **ARM_COLOURS,
    "tree": "#57a773",
    "unmixed": "#d99a8f",
    "both": "#c7452f",
    "alone": "#57a773",
    "slow": "#8f6fb8",
    "ingest": "#b8863b",
}
_ARMS = {
    **ARM_LABELS,
    "tree": "exact prefixes",
    "unmixed": "blended, with whole ones",
    "both": "blended, with those",
}
_LABELS = {
    "alone": "nothing beside",
    "full": "full prefills beside",
    "blended": "blends beside",
    "slow": f"blends from {SLOW_MB_S} MB/s",
    "ingest": "ingest beside",
}


def load_tables(arms: Mapping[str, LoadArm], bound_ms: float) -> tuple[Table, Table]:
    """Return a table with a row per arm and rate; then one of what each arm can sustain."""
    runs = table_with("arm", "rate/s", "done/s", "TTFT p50", "p95 ms")
    best = table_with("arm", "alone ms", "sustained/s", "/ full", "/ prefix")
    for name, arm in arms.items():
        for run in arm.runs:
            kept = run.ttft_ms.p95 <= bound_ms
            runs.add_row(
                name,
                f"{run.rate:.2f}",
                f"{run.completed_per_s:.2f}",
                f"{run.ttft_ms.p50:,.0f}",
                f"{run.ttft_ms.p95:,.0f}{'' if kept else ' >'}",
            )
        rate = f"{arm.per_s:.2f}" if arm.per_s else "none"
        best.add_row(
            name,
            f"{arm.alone.ttft_ms:,.0f}",
            rate if arm.past else f"{rate} at least",
            *(f"{ratio:.2f}x" if ratio else "-" for ratio in (arm.vs_full, arm.vs_prefix)),
        )
    return runs, best


def print_load(results: LoadResults, console: Console) -> None:
    """Print what arms did at each rate, and what they sustain."""
    setup, options = results.setup, results.setup.options
    plain = sum(run.not_blended for arm in results.arms.values() for run in arm.runs)
    for table in load_tables(results.arms, results.bound_ms):
        console.print(table, markup=False)
    if plain:
        console.print(f"Of the blended arm {plain:,} requests were prefilled instead.", markup=False)
    console.print(
        f"Sustained: the most answers a second while p95 of TTFT is {results.bound_ms:,.0f} ms at most"
        " (> marks more). TTFT: from when a request was due. alone: TTFT of requests one after another."
        f" {PROMPTS} prompts of {options.chunks} chunks of {options.chunk_tokens}"
        f" tokens, out of {options.pool} chunks: {setup.prompt_tokens[0]:,} to {setup.prompt_tokens[-1]:,}"
        f" tokens, answers of {options.max_tokens}; {options.seconds:g} s a rate;"
        f" {setup.settings.blending.recompute_ratio:.0%} recomputed. {where(setup.machine)}.",
        markup=False,
    )


def print_tree(results: TreeResults, console: Console) -> None:
    """Print what arms took for a first token, did at each rate and sustain, and how they compare."""
    setup, options = results.setup, results.setup.options
    prompt = sum(setup.prompt_tokens) / len(setup.prompt_tokens)
    found = table_with("arm", "rate/s", "requests", "not computed", "of it exact")
    for name, arm in results.arms.items():
        for run in arm.runs:
            exact = "" if name == "full" else f"{run.exact_tokens / prompt:.0%}"
            reused = f"{run.reused_tokens / prompt:.0%}"
            found.add_row(name, f"{run.rate:.2f}", f"{run.requests}", reused, exact)
    compared = table_with("mean TTFT", "rate/s", "ratio", "95 %")
    for one in results.compared:
        rate = "alone" if one.rate is None else f"{one.rate:.2f}"
        range_ = f"{one.ttft.low:.2f}-{one.ttft.high:.2f}"
        compared.add_row(f"{one.arm} / {one.against}", rate, f"{one.ttft.mean:.2f}x", range_)
    for table in (*load_tables(results.arms, results.bound_ms), found, compared):
        console.print(table, markup=False)
    count, tokens = results.documents
    drawn = "each once" if options.zipf is None else f"drawn with popularity rank**-{options.zipf:g}"
    console.print(
        f"Sustained: the most answers a second while p95 of TTFT is {results.bound_ms:,.0f} ms at most"
        " (> marks more; such an arm is asked at no higher rate). TTFT: from when a request was due."
        f" alone: {options.alone} requests one after another. Questions of {options.data.name}, {drawn}, with"
        f" {options.top_k} of {count} documents ({tokens:,} tokens): {setup.prompt_tokens[0]:,} to"
        f" {setup.prompt_tokens[-1]:,} tokens, answers of {options.max_tokens}. vLLM's prefix cache has room"
        f" for {options.pool:,} tokens, a tree for {options.tree:,}. {where(setup.machine)}.",
        markup=False,
    )


def draw_load(results: LoadResults | TreeResults, path: Path) -> None:
    """Write the picture: p50 to the left, p95 and its bound to the right."""
    figure = canvas.new_figure(9, 3.8)
    panels = figure.subplots(1, 2, sharey=True)
    bound = results.bound_ms / 1e3
    for axes, key, title in zip(panels, ("p50", "p95"), ("Median", "95th percentile"), strict=True):
        for name, arm in results.arms.items():
            rates = [run.rate for run in arm.runs]
            waits = [getattr(run.ttft_ms, key) / 1e3 for run in arm.runs]
            axes.plot(rates, waits, color=_COLOURS[name], marker="o", markersize=4, label=_ARMS[name])
        axes.set_ylim(0, _ROOM * bound)
        axes.set_xlim(left=0)
        canvas.finish_axes(axes, title, "requests a second", "time to first token, s")
    panels[1].axhline(bound, color=INK, linewidth=0.8, linestyle="--")
    panels[1].set_ylabel("")
    canvas.add_legend(figure, panels[0])
    canvas.save(figure, path, results.setup.machine)


def print_beside(results: BesideResults, console: Console) -> None:
    """Print a row per condition: running answers, a short prompt, and both by what they are alone."""
    answers = table_with("beside", "it takes ms", "ITL p50", "p95", "max ms", "p95 / alone", "p10-p90")
    short = table_with("beside", "short ms", "p10-p90", "/ alone", "p10-p90")
    for name, own in results.conditions.items():
        itl, takes = own.itl_ms, f"{own.arrival_ms.median:,.0f}" if own.arrival_ms else ""
        of_answers, of_short = (
            each.shown(".1f") if takes else ("", "") for each in (own.itl_p95_ratio, own.short_ratio)
        )
        answers.add_row(name, takes, *(f"{ms:,.0f}" for ms in (itl.p50, itl.p95, itl.max)), *of_answers)
        short.add_row(name, *own.short_ms.shown(), *of_short)
    for table in (answers, short):
        console.print(table, markup=False)
    setup, options = results.setup, results.setup.options
    console.print(
        f"ITL: between two tokens of {DECODES} running answers, alone, while a full prefill, a blend of the"
        f" same prompt, or one from a disk of {SLOW_MB_S} MB/s waits for its first token, or while its chunks"
        f" are stored. short: TTFT of a short plain prompt, sent {1e3 * INTO_S:.0f} ms into such a one, when"
        f" the engine does nothing else. {options.repeats} repeats: {options.chunks} chunks of"
        f" {options.chunk_tokens} tokens, {setup.settings.blending.recompute_ratio:.0%} recomputed."
        f" {where(setup.machine)}.",
        markup=False,
    )


def draw_beside(results: BesideResults, path: Path) -> None:
    """Write the picture: a point per token, a panel per condition, of the last repeat."""
    traces = results.trace
    figure = canvas.new_figure(13, 3.4)
    panels = figure.subplots(1, len(traces), sharey=True)
    for axes, (name, trace) in zip(panels, traces.items(), strict=True):
        seconds, latencies = [at for at, _ in trace], [latency for _, latency in trace]
        axes.scatter(seconds, latencies, s=5, color=_COLOURS[name])
        axes.set_yscale("log")
        canvas.finish_axes(axes, _LABELS[name], "s", "ms from token to token" if axes is panels[0] else "")
    canvas.save(figure, path, results.setup.machine)
