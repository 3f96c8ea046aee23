"""Options that several commands take. Those that are settings are None unless given, so that environment
variables and the YAML file keep their say."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import typer

from blendrag.options import BlendOverrides
from blendrag.remote import API_KEY

Command = TypeVar("Command", bound=Callable[..., None])

_SHORT = {"recompute_ratio": ("--ratio", "-r"), "quality": ("-q",)}  # beside their own names


def with_parameters(command: Command, more: Iterable[inspect.Parameter]) -> Command:
    """Return a command with these in place of its last parameter, which takes them: ``**given``."""
    signature = inspect.signature(command, eval_str=True)
    *own, _ = signature.parameters.values()
    command.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
    return command


def with_blending(command: Command) -> Command:
    """Decorate a command whose last parameter is ``**blending``: it takes an option for each of blending."""
    more = []
    for name, field in BlendOverrides.model_fields.items():
        kinds = [kind for kind in get_args(field.annotation) if kind in (bool, int, float, str)]
        kind: Any = kinds[0] if len(kinds) == 1 else str
        flag = "--" + name.replace("_", "-")
        flags = (f"{flag}/--no-{flag[2:]}",) if kind is bool else (flag, *_SHORT.get(name, ()))
        option = Annotated[kind | None, typer.Option(*flags, help=field.description)]
        more.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option))
    return with_parameters(command, more)


DEFAULT_INDEX = Path("blendrag-index")


def named_path(name: str | Path) -> Path:
    """Return a path that an option or argument names. Refuses a blank name, as a variable that is not set
    leaves it: it would be the working folder's."""
    if not str(name).strip():
        raise typer.BadParameter("no file or folder is named")
    return Path(name)


def path_option(help: str, *flags: str, metavar: str = "FILE", **more: Any) -> Any:
    """Return an option that names a file or a folder."""
    return typer.Option(*flags, help=help, parser=named_path, metavar=metavar, **more)


Index = Annotated[
    Path, path_option("Folder of the index.", "--index", "-i", metavar="PATH", show_default=True)
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="Model: a folder, a hub id, or the packaged default; an index that exists has its own.",
        metavar="NAME",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output and nothing else there.")]
SimilarityTopK = Annotated[
    int | None, typer.Option("--similarity-top-k", "-k", min=1, help="Chunks put into the prompt.")
]
Server = Annotated[
    str | None,
    typer.Option("--server", "-s", help="Server (blendrag serve) that answers, by its URL.", metavar="URL"),
]
Servers = Annotated[
    list[str] | None,
    typer.Option(
        "--server", "-s", help="Have servers keep the KV, by their URLs: repeat it for each.", metavar="URL"
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", envvar=API_KEY, help="Key of the server.", metavar="KEY", show_default=False),
]

# Of what measures
Plot = Annotated[Path | None, path_option("Draw the results: .png, .svg or .pdf.")]
Paste = Annotated[Path | None, path_option("Put the tables between their markers in a Markdown page.")]
Ratios = Annotated[
    str | None, typer.Option(help="Recompute ratios, with commas between them.", metavar="A,B,...")
]
Seed = Annotated[int, typer.Option(help="Seed of every random choice.")]
