"""What ``bench codecs`` shows to people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table


def print_codecs(results: Mapping[str, Any], console: Console) -> None:
    """A row per codec, largest first, then a row per codec and ratio, then what it was measured on."""
    codecs, config, machine = results["codecs"], results["config"], results["machine"]
    cost = _table("codec", "B/token", "smaller", "K error", "V error", "encode GB/s", "decode GB/s")
    drift = _table("codec", "ratio", "KL", "p90", "top-1", "KL from full", "TTFT ms")
    most = max(codec["bytes_per_token"] for codec in codecs.values())
    for name, codec in sorted(codecs.items(), key=lambda item: -item[1]["bytes_per_token"]):
        cost.add_row(
            name,
            f"{codec['bytes_per_token']:,.0f}",
            f"{most / codec['bytes_per_token']:.2f}x",
            f"{codec['k_error']:.2%}",
            f"{codec['v_error']:.2%}",
            *("-" if name == "raw" else f"{codec[which]:.2f}" for which in ("encode_gb_s", "decode_gb_s")),
        )
        for ratio, found in codec["ratios"].items():
            drift.add_row(
                name,
                ratio,
                f"{found['kl_from_raw']:.4f}",
                f"{found['kl_from_raw_p90']:.4f}",
                f"{found['top1_agreement']:.0%}",
                f"{found['kl_from_full']:.4f}",
                f"{found['ttft_ms']:,.0f}",
            )
    facts = (
        f"{config['repeats']} prompts, {config['chunks']} chunks of {config['chunk_tokens']} tokens;"
        f" {machine['model']} ({machine['dtype']}) on {machine['cpu']}, {machine['threads']} threads."
    )
    for part in (cost, _COST, drift, _DRIFT, facts):
        console.print(part, markup=False)


def _table(*columns: str) -> Table:
    table = Table()
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


_COST = (
    "Error: norm of the difference by norm, mean over chunks and layers. GB/s: of KV as the model has it, one"
    " thread; raw is a copy.\n"
)
_DRIFT = (
    "KL (nats), top-1: the first token against raw's at the same ratio. KL from full: against full prefill;"
    " raw's is what blending costs.\n"
)
