"""What ``bench layers`` shows to people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from blendrag.lab.report import table_with

_ROWS = 8  # layers shown, of as many as the model has


def print_layers(results: Mapping[str, Any], console: Console) -> None:
    """The three figures as tables: by layer, then by recompute ratio."""
    deviation, ranks = results["deviation"], results["spearman"]
    by_layer = table_with("layer", "V deviation", "p50", "p95", "top 15 %", "next layer", "K: top", "K: next")
    shown = deviation["v"][:: max(1, len(deviation["v"]) // _ROWS)]
    for row in shown:
        at = row["layer"] - 1
        by_layer.add_row(
            str(row["layer"]),
            f"{row['mean']['mean']:.3f}",
            f"{row['quantiles']['0.5']['mean']:.3f}",
            f"{row['quantiles']['0.95']['mean']:.3f}",
            f"{row['top_share']['mean']:.0%}",
            _rank(ranks["v"], at),
            f"{deviation['k'][at]['top_share']['mean']:.0%}",
            _rank(ranks["k"], at),
        )
    attention = results["attention"]
    by_ratio = table_with("recomputed", *attention)
    for ratio in next(iter(attention.values())):
        cells = (curve[ratio] for curve in attention.values())
        by_ratio.add_row(
            f"{float(ratio):.0%}", *(f"{c['mean']:.3f} ({c['p10']:.3f}-{c['p90']:.3f})" for c in cells)
        )
    for part in (by_layer, _BY_LAYER, by_ratio, _BY_RATIO, _facts(results)):
        console.print(part, markup=False)


def _rank(pairs: list[dict[str, float]], at: int) -> str:
    return f"{pairs[at]['mean']:.2f}" if at < len(pairs) else ""


_BY_LAYER = (
    "Deviation of stored from full prefill's V: squared L2 per token by the layer's mean squared norm. top"
    " 15 %: what share of all deviation these tokens hold. next layer: Spearman's rank correlation of the"
    " tokens' deviations with those of the layer above.\n"
)
_BY_RATIO = (
    "Attention of the last tokens: L2 distance from full prefill's attention matrix by its norm, mean over"
    " heads and layers (p10 to p90 of the prompts), with full prefill's queries. hkvd chooses at layer 1,"
    " hkvd_each at every layer by that layer's own deviation.\n"
)


def _facts(results: Mapping[str, Any]) -> str:
    config, machine = results["config"], results["machine"]
    lengths = config["prompt_tokens"]
    source = f"{config['data']} ({config['format']})" if config["data"] else "built-in text"
    return (
        f"{len(lengths)} prompts of {min(lengths):,} to {max(lengths):,} tokens, {source}; codec"
        f" {config['codec']}, shared prefix {config['shared_prefix']}; {machine['model']}"
        f" ({machine['dtype']}). Layer 0 deviates by at most {results['layer0']:.1g}."
    )
