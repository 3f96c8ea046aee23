"""What ``bench tree`` shows: tables."""

from __future__ import annotations

from rich.console import Console

from blendrag.lab.bench.load_report import load_tables
from blendrag.lab.bench.tree import TreeResults
from blendrag.lab.report import table_with, where


def print_tree(results: TreeResults, console: Console) -> None:
    """What arms took for a first token, did at each rate and sustain, and how they compare."""
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
