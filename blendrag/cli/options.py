"""Options that several commands take. Those that are settings are None unless given, so that environment
variables and the YAML file keep their say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_INDEX = Path("blendrag-index")

Index = Annotated[Path, typer.Option("--index", "-i", help="Folder of the index.", show_default=True)]
Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Model: a folder, a hub id, or the packaged default.", metavar="NAME"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output and nothing else there.")]
TopK = Annotated[int | None, typer.Option("--top-k", "-k", min=1, help="Chunks put into the prompt.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", min=1, help="Longest answer, in tokens.")]
Blend = Annotated[
    bool | None,
    typer.Option("--blend/--no-blend", help="--no-blend prefills the whole prompt, for comparison."),
]
RecomputeRatio = Annotated[
    float | None,
    typer.Option(
        "--recompute-ratio", "--ratio", "-r", min=0.0, max=1.0,
        help="Share of cached tokens that is recomputed.",
    ),
]  # fmt: skip
Quality = Annotated[
    str | None,
    typer.Option("--quality", "-q", metavar="STEP", help="fast, balanced or close to full prefill."),
]
Selector = Annotated[
    str | None,
    typer.Option("--selector", help="Which cached tokens are recomputed: query, hkvd, ..."),
]
