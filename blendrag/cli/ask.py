"""``blendrag ask``: one question to an index, or a conversation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blendrag.cli import options
from blendrag.cli.console import print_json, say
from blendrag.errors import BlendragError, EmptyIndexError, EngineError, PromptTooLongError

if TYPE_CHECKING:
    from blendrag.index.answering import Answering

_LONGEST_TOKENS = 1024


@options.with_blending
def ask(
    question: Annotated[
        str | None,
        typer.Argument(
            help="The question, in quotes; without one, several are read in a row.", show_default=False
        ),
    ] = None,
    index: options.Index = options.DEFAULT_INDEX,
    model: options.Model = None,
    similarity_top_k: options.SimilarityTopK = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer, in tokens; without a setting, 1,024.")
    ] = None,
    server: options.Server = None,
    api_key: options.ApiKey = None,
    show_thinking: Annotated[
        bool, typer.Option("--show-thinking", help="Print what the model thinks before it answers.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show what the prompt is made of instead of asking.")
    ] = False,
    trace: Annotated[
        Path | None,
        options.path_option("Write what was loaded and computed when, for chrome://tracing."),
    ] = None,
    html: Annotated[
        Path | None,
        options.path_option("Write the prompt as a strip: what is reused, repaired, computed."),
    ] = None,
    json: options.Json = False,
    **blending: Any,
) -> None:
    """Answer a question from an index, or several, each with the ones before it in mind."""
    from blendrag.cli.answering import print_plan, print_sources, print_stream, write_strip, write_trace_of

    if question is not None and not question.strip():
        raise typer.BadParameter("the question is empty", param_hint="QUESTION")
    if question is None and (explain or trace or html or json):
        needing = "--explain, --trace, --html and --json"
        raise typer.BadParameter(f"{needing} need a question", param_hint="QUESTION")
    for option, file in (("--trace", trace), ("--html", html)):
        if file and not file.resolve().parent.is_dir():
            raise typer.BadParameter(f"there is no folder {file.parent}", param_hint=option)
    with _ready(
        index,
        server,
        api_key,
        model=model,
        similarity_top_k=similarity_top_k,
        max_tokens=_length(max_tokens),
        **blending,
    ) as opened:
        if question is None:
            _converse(opened, show_thinking)
        elif explain:
            rows = opened.explain(question)
            print_json(rows) if json else print_plan(rows)
            write_strip({"documents": rows}, html)
        else:
            traced = True if trace else None
            if json:
                answer = opened.ask(question, trace=traced)
                print_json(answer.to_dict())
            else:
                stream = opened.stream(question, trace=traced)
                answer = print_stream(stream, show_thinking=show_thinking)
                print_sources(answer)
            write_trace_of(answer, trace)
            write_strip(answer.facts(), html)


def _converse(index: Answering, show_thinking: bool) -> None:
    with contextlib.suppress(ImportError):  # line editing in input(), where the system has it
        import readline  # noqa: F401

    say("Ctrl-C stops an answer, Ctrl-D leaves.")
    history: list[dict[str, str]] = []
    while True:
        try:
            question = input("\n> ").strip()
        except (EOFError, RuntimeError):  # the latter where there is no standard input at all
            typer.echo()
            return
        except KeyboardInterrupt:
            say("\nCtrl-D leaves.")
            continue
        if question:
            _answer(index, question, history, show_thinking)


@contextlib.contextmanager
def _ready(folder: Path, server: str | None, api_key: str | None, **options: Any) -> Iterator[Answering]:
    """Open an index with documents in it, and have its engine running or a server to ask."""
    from blendrag.cli.opening import open_index, open_served, start_engine

    opening: contextlib.AbstractContextManager[Answering] = (
        open_index(folder, **options) if server is None else open_served(folder, [server], api_key, **options)
    )
    with opening as index:
        if not index.stats()["documents"]:  # half a minute is not spent on starting an engine first
            raise EmptyIndexError(f"the index {str(index.root)!r} holds no documents: ingest some first")
        start_engine(index)
        yield index


def _length(given: int | None) -> int:
    """Return an answer's length in tokens: models may say the same over and over until their window ends."""
    from blendrag.settings import Settings

    return given or Settings.load().max_tokens or _LONGEST_TOKENS


def _answer(index: Answering, question: str, history: list[dict[str, str]], show_thinking: bool) -> None:
    """Answer, and remember. When the window is full, the oldest questions are forgotten."""
    from blendrag.cli.answering import print_sources, print_stream

    while True:
        try:
            stream = index.stream(question, history=history)
            answer = print_stream(stream, show_thinking=show_thinking)
        except PromptTooLongError as error:
            if not history:
                say(f"error: {error}")
                return
            say("the model's window is full: forgetting the oldest question")
            del history[:2]
            continue
        except KeyboardInterrupt:
            say("stopped")
            return
        except EngineError:
            raise
        except BlendragError as error:
            say(f"error: {error}")
            return
        print_sources(answer)
        history += [{"role": "user", "content": question}, {"role": "assistant", "content": answer.text}]
        return
