"""``blendrag demo``: real documents in, five questions, and what each would have cost without blending."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from blendrag.cli import options
from blendrag.cli.answering import print_sources, print_stream
from blendrag.cli.console import err, heading, interruptible, out, print_json, say
from blendrag.cli.opening import open_index, start_engine
from blendrag.machine import emulates_16_bit
from blendrag.tables import table_with

if TYPE_CHECKING:
    from rich.table import Table

    from blendrag.chat.answer import Answer
    from blendrag.index.index import BlendIndex
    from blendrag.settings import Settings

QUESTIONS = (
    "What are typer and rich each for, and why would a program use both?",
    "Which of the packages read documents such as PDF and HTML, and how do they differ?",
    "What do the MIT license and the Apache license each ask of someone who redistributes the software?",
    "How do pydantic and pydantic-settings work together to check a program's settings?",
    "What are safetensors and huggingface_hub, and how do they help to load a transformers model?",
)
_ANSWER_TOKENS = 80
_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Comparison:
    """One question's prompt prefilled in full and blended. Medians of the rounds, in seconds; tokens."""

    question: str
    full_s: float
    blended_s: float
    full_tokens: int
    blended_tokens: int

    @property
    def speedup(self) -> float:
        return self.full_s / self.blended_s

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"speedup": self.speedup}


def _name(settings: Settings) -> str:
    """Return the name of the demo's folder: an index is opened only with what it was made with."""
    from blendrag.store.identity import LAYOUT_VERSION, prefix_name

    kind, prefix = settings.shared_prefix, ""
    if kind != "none":
        said = settings.system_prompt if kind == "system" else ""
        prefix = prefix_name(kind, [0, *said.encode()])[: len(kind) + 8]
    s = settings
    parts = (s.model, s.dtype, s.new_codec, s.namespace, prefix, f"v{LAYOUT_VERSION}")
    return re.sub(r"[^\w.-]+", "-", "-".join(part for part in parts if part))


def demo(
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Folder of the demo's index, kept for the next time.")
    ] = None,
    model: options.Model = None,
    json: options.Json = False,
) -> None:
    """Ingest real documents found on this machine, ask five questions, and show what was saved."""
    from blendrag.cli.demo_documents import demo_documents
    from blendrag.settings import Settings

    settings = Settings.load(model=model)
    if settings.dtype == "auto" and emulates_16_bit():
        settings = settings.model_copy(update={"dtype": "float32"})
    folder = folder or settings.cache_dir / "demo" / _name(settings)
    console = err() if json else out()
    documents = demo_documents()
    heading("1. Ingest", console)
    console.print(
        f"{len(documents)} real documents from this machine: the project's own documentation, and the"
        " descriptions and licences that installed packages brought along. Each is split into chunks, and"
        " each chunk is prefilled once, apart from the others; its KV cache is kept on disk. That is the slow"
        " part, and the next run skips it."
    )
    with (
        interruptible("interrupted: what was ingested is kept; the same command goes on from there"),
        open_index(
            folder, create=True, model=model, dtype=settings.dtype, max_tokens=_ANSWER_TOKENS
        ) as index,
    ):
        report = index.ingest(documents)
        chunks = index.stats()["chunks"]
        console.print(
            f"{report.added + report.changed} documents new or changed, {report.unchanged} unchanged;"
            f" {report.tokens:,} tokens prefilled now"
            + (f" at {report.tokens_per_s:,.0f} tokens/s." if report.tokens else ".")
            + f" The index holds {chunks['chunks']} chunks, {chunks['tokens']:,} tokens,"
            f" {chunks['bytes'] / 2**20:,.0f} MiB of KV in {folder}"
        )
        start_engine(index)
        if not json:
            _show_answers(index)
        compared: list[Comparison] = []
        if index.start().blends:
            compared = _compare(index, console)
            console.print(_table(compared))
            console.print(
                "tokens: what the model computed of the prompt; TTFT: time to the first token.\n"
                f"Median speed-up: {median(row.speedup for row in compared):.1f}x"
            )
        else:
            say(f"no comparison: this model is not blended ({index.start().facts.reason})")
        if json:
            print_json({"ingest": report.to_dict(), "questions": [row.to_dict() for row in compared]})


def _show_answers(index: BlendIndex) -> None:
    console = out()
    heading("2. Ask", console)
    console.print(
        "Five questions, each answered from the chunks most like it. The model has not read those chunks in"
        " this order before, nor next to each other: their stored KV is put together, the tokens where that"
        " matters most are recomputed, and only the question and the words between are new."
        + (" (The packaged model is tiny: watch the work it is spared rather than its wit.)"
           if "135m" in index.settings.model.lower() else "")
    )  # fmt: skip
    for question in QUESTIONS:
        console.print(Text(f"\n> {question}", style="bold"))
        print_sources(print_stream(index.stream(question)))


def _compare(index: BlendIndex, console: Console) -> list[Comparison]:
    """Compare the questions' prompts, prefilled in full and blended. The first one is asked once more, before
    all others, to warm up."""
    from blendrag.lab.experiment import in_turn
    from blendrag.progress import progress_bar

    heading("3. What was saved", console)
    console.print(
        f"The same prompts again, prefilled in full and blended in turn, {_ROUNDS} times each, up to the"
        " first token of the answer. The engine's prefix cache is emptied before each run, so that neither"
        " way profits from the one before."
    )
    engine, arms = index.start(), {"full": False, "blended": True}
    answers: dict[tuple[str, str], list[Answer]] = defaultdict(list)
    with progress_bar() as progress:
        for turn in in_turn(arms, [QUESTIONS[0], *_ROUNDS * QUESTIONS], progress):
            engine.reset_prefix_cache()
            answer = index.ask(turn.trial, max_tokens=1, blend=turn.arm)
            if not turn.warms_up:
                answers[turn.trial, turn.key].append(answer)
    rows = []
    for question in QUESTIONS:
        full, blended = (answers[question, arm] for arm in arms)
        full_s, blended_s = (median(answer.ttft_s for answer in own) for own in (full, blended))
        tokens = full[-1].evidence.computed, blended[-1].evidence.computed
        rows.append(Comparison(question, full_s, blended_s, *tokens))
    return rows


def _table(rows: Sequence[Comparison]) -> Table:
    columns = ("tokens\nfull", "tokens\nblended", "TTFT\nfull", "TTFT\nblended", "speed-up")
    table = table_with("question", *columns)
    for row in rows:
        table.add_row(
            Text(row.question),
            f"{row.full_tokens:,}",
            f"{row.blended_tokens:,}",
            f"{row.full_s:.2f} s",
            f"{row.blended_s:.2f} s",
            f"{row.speedup:.1f}x",
        )
    return table
