"""Output of answers and plans, for ``ask`` and ``demo``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table
from rich.text import Text

from blendrag.cli.console import err, out, shown
from blendrag.errors import ConfigError

if TYPE_CHECKING:
    from blendrag.chat.answer import Answer
    from blendrag.index.answering import AnswerStream


def print_stream(stream: AnswerStream, *, show_thinking: bool = False) -> Answer:
    """Print an answer as it comes. Ctrl-C stops the generation and passes on.

    show_thinking: print what the model thinks before it; else only that it does.
    """
    thinking, printed = err().status("thinking"), False
    try:
        for piece in stream.pieces():
            if piece.reasoning and show_thinking:
                out().print(Text(piece.reasoning, style="dim"), end="", soft_wrap=True)
                printed = True
            elif piece.reasoning:
                thinking.start()
            if piece.text:
                thinking.stop()
                typer.echo(f"\n{piece.text}" if printed else piece.text, nl=False)
                printed = False
    finally:
        thinking.stop()
        typer.echo()
        stream.close()
    assert stream.answer is not None, "a stream that ended without an error has its answer"
    return stream.answer


def print_sources(answer: Answer) -> None:
    """Print where the answer comes from, a line per document, and what was computed for it."""
    best: dict[str, list[float]] = {}
    for source in answer.sources:
        best.setdefault(source.source, []).append(source.score)
    for name, scores in best.items():
        chunks = f"  ({len(scores)} chunks)" if len(scores) > 1 else ""
        out().print(Text(f"  {max(scores):.2f}  {shown(name)}{chunks}", style="cyan"), soft_wrap=True)
    out().print(Text(f"  {evidence_line(answer)}", style="dim"), soft_wrap=True)


def write_trace_of(answer: Answer, path: Path | None) -> None:
    """Write what was loaded and computed when, if a path was given; say so if there is nothing to tell."""
    from blendrag.load.trace import write_trace

    if path is None:
        return
    if not answer.evidence.trace:
        err().print(Text(f"no trace: nothing was loaded ({answer.evidence.plain or 'prefix cache'})"))
        return
    write_trace({"request": answer.evidence.trace}, path)


def write_strip(facts: Mapping[str, Any], path: Path | None) -> None:
    """Write a prompt as a strip, if a path was given. Raises ConfigError if the file cannot be written."""
    from blendrag.strip import Strip

    if path is None:
        return
    try:
        path.write_text(Strip(facts).page(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path}: {error.strerror}") from error


def evidence_line(answer: Answer) -> str:
    """Say which prompt tokens were reused, recomputed and computed fresh, and the time to the first token."""
    evidence = answer.evidence
    parts = [
        f"{evidence.reused:,} tokens reused",
        f"{evidence.recomputed:,} recomputed",
        f"{evidence.fresh:,} fresh",
    ]
    if evidence.prefix:
        parts.append(f"{evidence.prefix:,} from the prefix cache")
    if evidence.missing:
        away = sum(reason == "unavailable" for reason in evidence.missing.values())
        if away:
            parts.append(f"{away} chunks could not be reached")
        if gone := len(evidence.missing) - away:
            parts.append(f"{gone} chunks were missing and are stored again")
    line = f"{', '.join(parts)}; first token after {answer.ttft_s:.2f} s"
    return f"{line} (not blended: {evidence.plain})" if evidence.plain else line


def print_plan(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows of ``BlendIndex.explain`` as a table."""
    table = Table(title="Plan of the prompt", title_justify="left")
    table.add_column("segment", no_wrap=True)
    table.add_column("source", overflow="fold")
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("cached", justify="right", no_wrap=True)
    table.add_column("why")
    table.add_column("text", overflow="fold")
    for row in rows:
        source, text = shown(row["source"] or ""), row["text"] or "(white space)"
        numbers = f"{row['tokens']:,}", f"{row['reused']:,}"
        table.add_row(*map(Text, (row["kind"], source, *numbers, row["reason"], text)))
    out().print(table)
