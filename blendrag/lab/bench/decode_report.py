"""What ``bench decode`` shows."""

from __future__ import annotations

from rich.console import Console

from blendrag.lab.bench.decode import DecodeResults
from blendrag.lab.report import table_with, where


def print_decode(results: DecodeResults, console: Console) -> None:
    """A row per arm and number of answers."""
    names = ("at once", "TTFT ms", "x", "2nd ms", "ms", "x", "held", "x")
    table = table_with("arm", *names)
    for (arm, count), own in results.rows.items():
        table.add_row(
            arm,
            str(count),
            f"{own.ttft_ms.median:,.0f}",
            f"{own.ttft_ratio.median:.2f}x",
            f"{own.second_ms.median:,.0f}",
            f"{own.itl_ms.median:,.1f}",
            f"{own.itl_ratio.median:.2f}x",
            f"{own.held.median:.1%}",
            f"{own.held_ratio.median:.2f}x",
        )
    setup, options = results.setup, results.setup.options
    console.print(table, markup=False)
    console.print(
        f"whole: decoded from all KV; evicted: from {results.kept} tokens a head, {results.freed} blocks of a"
        f" prompt given back; floor: from all KV of prompts about as short. TTFT: of the first of them; 2nd:"
        f" from the first token to the second, between which what is kept is chosen; ms: a token after that;"
        f" held: of the engine's KV blocks; x: to whole."
        f" {options.repeats} repeats, {options.tokens} tokens an answer,"
        f" {max(setup.prompt_tokens):,} a prompt. {where(setup.machine)}.",
        markup=False,
    )
