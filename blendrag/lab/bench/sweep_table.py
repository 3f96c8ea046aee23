"""The table of ``bench sweep``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from blendrag.lab.canvas import where
from blendrag.lab.report import table_with


def print_sweep(results: Mapping[str, Any], console: Console) -> None:
    """A row per value: TTFT of the four arms, and what blending saves."""
    axis, points, config = results["axis"], results["points"], results["config"]
    ttft = table_with(axis, "full ms", "prefix ms", "reuse ms", "blended ms", "p10-p90")
    gain = table_with(axis, "full / blended", "p10-p90", "prefix / blended", "p10-p90", "KL")
    for point in points:
        arms, value = point["arms"], str(point["value"])
        blended = arms["blended"]
        ttft.add_row(
            value,
            *(f"{arms[arm]['ttft_ms']['median']:,.0f}" for arm in ("full", "prefix", "reuse", "blended")),
            f"{blended['ttft_ms']['p10']:,.0f}-{blended['ttft_ms']['p90']:,.0f}",
        )
        times = [
            text
            for other in ("full", "prefix")
            for each in (blended[f"speedup_vs_{other}"],)
            for text in (f"{each['median']:.2f}x", f"{each['p10']:.2f}-{each['p90']:.2f}")
        ]
        gain.add_row(value, *times, f"{blended['kl_first_token']:.4f}")
    for table in (ttft, gain):
        console.print(table, markup=False)
    fixed = {
        "chunks": f"{config['chunks']} chunks",
        "chunk_tokens": f"{config['chunk_tokens']} tokens a chunk",
        "ratio": f"{config['ratio']:.0%} recomputed",
        "codec": f"codec {config['codec']}",
    }
    others = ", ".join(text for name, text in fixed.items() if name != axis)
    batch = ", each the mean of the prompts sent at once" if axis == "batch" else ""
    console.print(
        f"TTFT: time to first token, medians of {config['repeats']} repeats{batch}; {others}, selector"
        f" {config['selector']}. KL: the first token against full's. {where(results['machine'])}.",
        markup=False,
    )
