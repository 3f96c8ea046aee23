"""Tables and pictures of ``bench ttft``: of arms, or of a parameter's values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from blendrag.lab import canvas
from blendrag.lab.arms import PARTS
from blendrag.lab.bench.ttft import ARMS, TtftResults
from blendrag.lab.canvas import ARM_COLOURS, ARM_LABELS, INK
from blendrag.lab.results import where
from blendrag.lab.statistics import Summary
from blendrag.tables import table_with

_PART_COLOURS = {"load": "#e9a23b", "select": "#8e6cc0", "recompute": "#2f81c7", "engine": "#9ecae1"}
_PLAIN = "#a8b0b8"


def print_ttft(results: TtftResults, console: Console) -> None:
    """Print a row per arm: how fast, and how close to full prefill; then where the time went."""
    speed = table_with("arm", "TTFT ms", "p10-p90", "speed-up", "p10-p90", "KL", "top-1")
    for name, arm in results.arms.items():
        speed.add_row(
            name,
            *arm.ttft_ms.shown(",.0f"),
            *_times(arm, "full"),
            f"{arm.kl_first_token:.4f}",
            f"{arm.top1_agreement:.0%}",
        )
    legend = (
        "TTFT: time to first token, median. prefix: vLLM's prefix caching, the same chunks seen before in"
        " another order (of a hybrid model, in this order). exact: the prompt's own KV from a tree, in RAM or"
        " (cold) on disk. speed-up: full / arm, repeat by repeat. KL, top-1: the first token against full's."
        " Below: chunk tokens computed again; load to engine: where the TTFT went, ms.\n"
    )
    for part in (speed, legend, _split("arm", results.arms.items()), _facts(results)):
        console.print(part, markup=False)


def print_sweep(results: TtftResults, console: Console) -> None:
    """Print a row per value: TTFT of the arms, what blending saves, where its time goes, codecs."""
    axis = results.axis.name
    ttft = table_with(axis, "full ms", "prefix ms", "reuse ms", "blended ms", "p10-p90")
    gain = table_with(axis, "full / blended", "p10-p90", "prefix / blended", "p10-p90", "KL")
    for value, arms in results.points.items():
        blended = arms["blended"]
        medians = (f"{arms[name].ttft_ms.median:,.0f}" for name in ARMS)
        ttft.add_row(str(value), *medians, blended.ttft_ms.shown()[1])
        gains = (*_times(blended, "full"), *_times(blended, "prefix"))
        gain.add_row(str(value), *gains, f"{blended.kl_first_token:.4f}")
    split = _split(axis, ((str(value), arms["blended"]) for value, arms in results.points.items()))
    for table in (ttft, gain, split, *([_codecs(results)] if results.codecs else [])):
        console.print(table)
    console.print(_facts(results), markup=False)


def _times(arm: Summary, rival: str) -> tuple[str, str]:
    median, spread = arm.speedup[rival].shown(".2f")
    return f"{median}x", spread


def _split(first: str, arms: Iterable[tuple[str, Summary]]) -> Table:
    table = table_with(first, "recomputed", *PARTS, "engine")
    for name, arm in arms:
        parts = (f"{arm.split_ms[part]:,.0f}" if arm.blended else "" for part in PARTS)
        table.add_row(name, f"{arm.tokens_recomputed:,}", *parts, f"{arm.split_ms['engine']:,.0f}")
    return table


def _codecs(results: TtftResults) -> Table:
    table = table_with("codec", "B/token", "smaller", "K error", "V error")
    most = max(cost.bytes_per_token for cost in results.codecs.values())
    for name, cost in results.codecs.items():
        smaller = f"{most / cost.bytes_per_token:.2f}x"
        errors = f"{cost.k_error:.2%}", f"{cost.v_error:.2%}"
        table.add_row(name, f"{cost.bytes_per_token:,.0f}", smaller, *errors)
    return table


def _facts(results: TtftResults) -> str:
    setup, options, axis = results.setup, results.setup.options, results.axis.name
    settings = setup.settings
    fixed = {
        "chunks": f"{options.chunks} chunks",
        "chunk_tokens": f"{options.chunk_tokens} tokens a chunk",
        "codec": f"codec {settings.new_codec}",
    }
    if axis != "quality":
        fixed |= {
            "ratio": f"{settings.blending.recompute_ratio:.0%} recomputed",
            "selector": f"selector {settings.blending.selector}",
        }
    same = ", ".join(text for name, text in fixed.items() if name != axis)
    accelerator = "" if setup.machine.device == "cpu" else f", {setup.machine.device}"
    return (
        f"TTFT: time to first token, medians of {options.repeats} repeats; {same},"
        f" prompts of {setup.prompt_tokens[0]:,} to {setup.prompt_tokens[-1]:,} tokens. KL: the first token"
        f" against full's. {where(setup.machine)}{accelerator}."
    )


# -- pictures ---------------------------------------------------------------------------------------------


def draw_ttft(results: TtftResults, path: Path) -> None:
    """Write the picture: a bar per arm, those of blends split into where the time goes."""
    from matplotlib.patches import Patch

    arms, options = results.arms, results.setup.options
    figure = canvas.new_figure(8, 1.9 + 0.48 * len(arms))
    axes = figure.add_subplot()
    for row, arm in enumerate(arms.values()):
        _bar(axes, row, arm)
    axes.set_yticks(range(len(arms)), [_label(name) for name in arms])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.16 * max(arm.ttft_ms.p90 for arm in arms.values()))
    title = f"{options.chunks} chunks of {options.chunk_tokens} tokens"
    canvas.finish_axes(axes, title, "time to first token, ms (median; whiskers: p10 to p90)", "")
    figure.legend(
        handles=[
            Patch(color=_PLAIN, label="plain prefill"),
            *(Patch(color=colour, label=part) for part, colour in _PART_COLOURS.items()),
        ],
        loc="outside upper center", ncols=5, labelcolor=INK, frameon=False, fontsize=9,
    )  # fmt: skip
    canvas.save(figure, path, results.setup.machine)


def _bar(axes: Any, row: int, arm: Summary) -> None:
    ttft, left = arm.ttft_ms, 0.0
    parts = _PART_COLOURS.items() if arm.blended else [("engine", _PLAIN)]
    for part, colour in parts:
        axes.barh(row, arm.split_ms[part], left=left, height=0.62, color=colour)
        left += arm.split_ms[part]
    whiskers = [[ttft.median - ttft.p10], [ttft.p90 - ttft.median]]
    axes.errorbar(ttft.median, row, xerr=whiskers, color=INK, capsize=3, linewidth=1)
    axes.annotate(
        f"{arm.speedup['full'].median:.1f}×", (max(ttft.p90, ttft.median), row), (6, 0),
        textcoords="offset points", va="center", color=INK, fontsize=10, fontweight="bold",
    )  # fmt: skip


def _label(name: str) -> str:
    kind, _, ratio = name.partition("@")
    return f"blended, {100 * float(ratio):g} %" if ratio else ARM_LABELS.get(kind, kind)


def draw_sweep(results: TtftResults, path: Path) -> None:
    """Write the picture: TTFT to the left, full prefill / arm to the right; a line and a band per arm."""
    values, points = list(results.points), results.points.values()
    numbers = [value for value in values if not isinstance(value, str)]
    at: Sequence[float] = numbers or range(len(values))
    figure = canvas.new_figure(9, 3.8)
    panels = figure.subplots(1, 2)
    for name, colour in ARM_COLOURS.items():
        for axes, spreads, scale in (
            (panels[0], [arms[name].ttft_ms for arms in points], 1e-3),
            (panels[1], [arms[name].speedup["full"] for arms in points], 1.0),
        ):
            if name == "full" and axes is panels[1]:
                continue
            low, middle, high = (
                [scale * getattr(each, key) for each in spreads] for key in ("p10", "median", "p90")
            )
            axes.plot(at, middle, color=colour, marker="o", markersize=4, label=ARM_LABELS[name])
            axes.fill_between(at, low, high, color=colour, alpha=0.2, linewidth=0)
    for axes in panels:
        axes.set_ylim(bottom=0)
        if not numbers:
            axes.set_xticks(at, values)
    canvas.finish_axes(panels[0], "Time to first token", results.axis.label, "s (median, p10 to p90)")
    canvas.finish_axes(panels[1], "Full prefill / arm", results.axis.label, "times")
    canvas.add_legend(figure, panels[0])
    canvas.save(figure, path, results.setup.machine)
