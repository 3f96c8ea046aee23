"""The results for people (a table) and for scripts (JSON)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from blendrag.errors import ConfigError
from blendrag.lab.statistics import PARTS


def to_json(results: Mapping[str, Any]) -> str:
    """The results as one JSON document; numbers that are not finite are refused."""
    return json.dumps(results, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def check_json_path(path: Path, option: str = "--json") -> None:
    """Raise ConfigError unless a file can be written there: better before measuring than after."""
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise ConfigError(f"{option} {path}: not a file in a folder that exists")


def write_json(results: Mapping[str, Any], path: Path) -> None:
    """Write ``to_json``. Raises ConfigError if the file cannot be written."""
    try:
        path.write_text(to_json(results), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}") from error


def print_table(results: Mapping[str, Any], console: Console) -> None:
    """A row per arm: how fast and how close to full prefill; then where the time went; then what it was."""
    speed = table_with("arm", "TTFT ms", "p10-p90", "speed-up", "p10-p90", "KL", "top-1")
    split = table_with("arm", "recomputed", *PARTS, "engine")
    for name, arm in results["arms"].items():
        ttft, speedup, parts = arm["ttft_ms"], arm["speedup_vs_full"], arm["split_ms"]
        speed.add_row(
            name,
            f"{ttft['median']:,.0f}",
            f"{ttft['p10']:,.0f}-{ttft['p90']:,.0f}",
            f"{speedup['median']:.2f}x",
            f"{speedup['p10']:.2f}-{speedup['p90']:.2f}",
            f"{arm['kl_first_token']:.4f}",
            f"{arm['top1_agreement']:.0%}",
        )
        split.add_row(
            name,
            f"{arm['tokens_recomputed']:,}",
            *(f"{parts[part]:,.0f}" if was_blended(arm) else "" for part in PARTS),
            f"{parts['engine']:,.0f}",
        )
    for part in (speed, _LEGEND, split, _facts(results)):
        console.print(part, markup=False)


def was_blended(arm: Mapping[str, Any]) -> bool:
    """Whether an arm's time has parts; plain prefill is the engine's alone."""
    return any(arm["split_ms"][part] for part in PARTS)


def table_with(first: str, *columns: str) -> Table:
    """An empty table: the first column to the left, the others, numbers, to the right."""
    table = Table()
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


_LEGEND = (
    "TTFT: time to first token, median. prefix: vLLM's prefix caching, the same chunks seen before in"
    " another order. speed-up: full / arm, repeat by repeat. KL, top-1: the first token against full's."
    " Below: chunk tokens computed again; load to engine: where the TTFT went, ms.\n"
)


def _facts(results: Mapping[str, Any]) -> str:
    config, machine, ingest = results["config"], results["machine"], results["ingest"]
    lengths = config["prompt_tokens"]
    return (
        f"{config['repeats']} repeats, {config['chunks']} chunks of {config['chunk_tokens']} tokens,"
        f" prompts of {min(lengths):,} to {max(lengths):,} tokens; {machine['model']} on {machine['cpu']},"
        f" {machine['threads']} threads{_accelerator(machine['device'])}.\n"
        f"Ingest {ingest['tokens_per_s']:,.0f} tokens/s ({ingest['prefill_tokens_per_s']:,.0f} but for the"
        f" disk); plain prefill of the same {ingest['plain_tokens_per_s']:,.0f} tokens/s:"
        f" {ingest['ratio_to_plain']:.0%}."
    )


def _accelerator(device: str) -> str:
    return "" if device == "cpu" else f", {device}"
