"""``blendrag demo``: real documents in, five questions, and what each would have cost without blending."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.text import Text

from blendrag.cli import options
from blendrag.cli.answering import print_sources, print_stream
from blendrag.cli.console import err, heading, interruptible, out, print_json, say
from blendrag.cli.opening import open_index, start_engine
from blendrag.machine import emulates_16_bit
from blendrag.tables import table_with

if TYPE_CHECKING:
    from blendrag.chat.answer import Answer
    from blendrag.index.index import BlendIndex

QUESTIONS = (
    "What are typer and rich each for, and why would a program use both?",
    "Which of the packages read documents such as PDF and HTML, and how do they differ?",
    "What do the MIT license and the Apache license each ask of someone who redistributes the software?",
    "How do pydantic and pydantic-settings work together to check a program's settings?",
    "What are safetensors and huggingface_hub, and how do they help to load a transformers model?",
)
_COLUMNS = ("tokens\nfull", "tokens\nblended", "TTFT\nfull", "TTFT\nblended", "speed-up")
_FORMS = ("{:,}", "{:,}", "{:.2f} s", "{:.2f} s", "{:.1f}x")
_ANSWER_TOKENS = 80
_ROUNDS = 2


def demo(
    folder: Annotated[
        Path | None,
        options.path_option(
            "Folder of the demo's index, kept for the next time.", "--folder", metavar="PATH"
        ),
    ] = None,
    model: options.Model = None,
    json: options.Json = False,
) -> None:
    """Ingest real documents found on this machine, ask five questions, and show what was saved."""
    from blendrag.cli.demo_documents import demo_documents
    from blendrag.serving.lease import default_kv_dir
    from blendrag.settings import Settings

    settings = Settings.load(model=model)
    if settings.dtype == "auto" and emulates_16_bit():
        settings = settings.model_copy(update={"dtype": "float32"})
    console = err() if json else out()
    documents = demo_documents()
    heading("1. Ingest", console)
    console.print(
        f"{len(documents)} real documents from this machine: the project's own documentation, and the"
        " descriptions and licences that installed packages brought along. Each is split into chunks, and"
        " each chunk is prefilled once, apart from the others; its KV cache is kept on disk. That is the slow"
        " part, and the next run skips it."
    )
    folder = folder or settings.cache_dir / "demo" / default_kv_dir(settings).name  # one for each identity
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
        compared: list[dict[str, Any]] = []
        if index.start().blends:
            compared = _compare(index, console)
            table = table_with("question", *_COLUMNS)
            for question, *numbers in (row.values() for row in compared):
                cells = zip(_FORMS, numbers, strict=True)
                table.add_row(Text(question), *(form.format(number) for form, number in cells))
            console.print(table)
            console.print(
                "tokens: what the model computed of the prompt; TTFT: time to the first token.\n"
                f"Median speed-up: {median(row['speedup'] for row in compared):.1f}x"
            )
        else:
            say(f"no comparison: this model is not blended ({index.start().facts.reason})")
        if json:
            print_json({"ingest": report.to_dict(), "questions": compared})


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


def _compare(index: BlendIndex, console: Console) -> list[dict[str, Any]]:
    """Return a row per question, its prompt prefilled in full and blended: medians of the rounds. The first
    one is asked once more, before all others, to warm up."""
    from blendrag.lab.arms import reset
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
            reset(engine)
            answer = index.ask(turn.trial, max_tokens=1, blend=turn.arm)
            if not turn.warms_up:
                answers[turn.trial, turn.key].append(answer)
    rows = []
    for question in QUESTIONS:
        row: dict[str, Any] = {"question": question}
        row |= {f"{arm}_tokens": answers[question, arm][-1].evidence.computed for arm in arms}
        row |= {f"{arm}_s": median(answer.ttft_s for answer in answers[question, arm]) for arm in arms}
        rows.append(row | {"speedup": row["full_s"] / row["blended_s"]})
    return rows
