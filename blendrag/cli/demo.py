"""``blendrag demo``: real documents in, five questions, and what each would have cost without blending."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from blendrag.cli import options
from blendrag.cli.answering import print_sources, print_stream
from blendrag.cli.console import err, interruptible, out, say
from blendrag.cli.opening import open_index, start_engine
from blendrag.machine import emulates_16_bit

if TYPE_CHECKING:
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


def _name(settings: Settings) -> str:
    """Of the demo's folder: an index is opened only with what it was made with."""
    from blendrag.store.identity import LAYOUT_VERSION, prefix_name

    kind, prefix = settings.shared_prefix, ""
    if kind != "none":
        said = settings.system_prompt if kind == "system" else ""
        prefix = prefix_name(kind, [0, *said.encode()])[: len(kind) + 8]
    s = settings
    parts = (s.model, s.dtype, s.codec, s.namespace, prefix, f"v{LAYOUT_VERSION}")
    return re.sub(r"[^\w.-]+", "-", "-".join(part for part in parts if part))


def demo(
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Folder of the demo's index, kept for the next time.")
    ] = None,
    model: options.Model = None,
) -> None:
    """Ingest real documents found on this machine, ask five questions, and show what was saved."""
    from blendrag.cli.demo_documents import demo_documents
    from blendrag.settings import Settings

    settings = Settings.load(model=model)
    if settings.dtype == "auto" and emulates_16_bit():
        settings = settings.model_copy(update={"dtype": "float32"})
    folder = folder or settings.cache_dir / "demo" / _name(settings)
    console = out()
    documents = demo_documents()
    console.rule("1. Ingest", align="left")
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
        _show_answers(index)
        if index.start().blends:
            _show_comparison(index)
        else:
            say(f"no comparison: this model is not blended ({index.start().facts.reason})")


def _show_answers(index: BlendIndex) -> None:
    console = out()
    console.rule("2. Ask", align="left")
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


def _show_comparison(index: BlendIndex) -> None:
    console = out()
    console.rule("3. What was saved", align="left")
    console.print(
        f"The same five prompts again, prefilled in full and blended in turn, {_ROUNDS} times each, up to the"
        " first token of the answer. The engine's prefix cache is emptied before each run, so that neither"
        " way profits from the one before."
    )
    with err().status("measuring"):
        rows = _compare(index)
    table = Table()
    table.add_column("question")
    for column in ("tokens\nfull", "tokens\nblended", "TTFT\nfull", "TTFT\nblended", "speed-up"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            Text(row.question),
            f"{row.full_tokens:,}",
            f"{row.blended_tokens:,}",
            f"{row.full_s:.2f} s",
            f"{row.blended_s:.2f} s",
            f"{row.speedup:.1f}x",
        )
    console.print(table)
    console.print(
        "tokens: what the model computed of the prompt; TTFT: time to the first token.\n"
        f"Median speed-up: {median(row.speedup for row in rows):.1f}x"
    )


def _compare(index: BlendIndex) -> list[Comparison]:
    engine = index.start()
    rows = []
    for number, question in enumerate(QUESTIONS):
        answers: dict[bool, list[Answer]] = {False: [], True: []}
        for attempt in range(-1 if number == 0 else 0, _ROUNDS):
            for blend in answers:
                engine.reset_prefix_cache()
                answer = index.ask(question, max_tokens=1, blend=blend)
                if attempt >= 0:  # the very first one is a warm-up
                    answers[blend].append(answer)
        rows.append(
            Comparison(
                question,
                median(answer.ttft_s for answer in answers[False]),
                median(answer.ttft_s for answer in answers[True]),
                answers[False][-1].evidence.computed,
                answers[True][-1].evidence.computed,
            )
        )
    return rows
