"""The command line as a new user meets it, without an engine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, get_args, get_type_hints
from unittest.mock import Mock

import pytest
import typer
from typer.testing import Result

from blendrag import __version__
from blendrag.cli.app import app
from blendrag.cli.ask import _converse, _length
from blendrag.cli.demo_documents import demo_documents
from blendrag.cli.options import named_path
from blendrag.files.lock import IndexLock
from blendrag.index.ledger import Ledger
from blendrag.index.loaders import Document
from blendrag.serving.owners import owner_of
from blendrag.store.catalogue import Catalogue
from places import ROOT

Blendrag = Callable[..., Result]


def ran(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], env=os.environ | env, capture_output=True, text=True, timeout=60
    )


def complaint(result: Result) -> str:
    """The one line on standard error with which a command failed."""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_help_and_version_load_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['blendrag', sys.argv[1]]\n"
        "from blendrag.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'vllm', 'transformers', 'chromadb', 'sentence_transformers', 'matplotlib'}\n"
        "sys.exit(f'loaded {sorted(heavy & sys.modules.keys())}' if heavy & sys.modules.keys() else 0)"
    )
    for flag in ("--help", "--version"):
        done = ran("-c", code, flag)
        assert done.returncode == 0, done.stderr


def commands(group: Any) -> Iterator[str]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from (f"{name} {each}" for each in commands(command))
        else:
            yield name


def test_every_command_has_help_and_there_are_no_more_than_anybody_can_look_through(
    blendrag: Blendrag,
) -> None:
    names = set(commands(typer.main.get_command(app)))
    assert {"ingest", "sync", "ask", "stats", "doctor", "demo", "verify", "gc", "purge"} < names
    assert len(names) <= 18
    all_of_them = blendrag("--help").stdout
    for name in names:
        result = blendrag(*name.split(), "--help")
        assert result.exit_code == 0 and "Usage" in result.stdout
        assert name.split()[0] in all_of_them


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["aks", "who?"], "ask"),
        (["ask", "who?", "--ration", "0.5"], "--ratio"),
        (["ask", " "], "empty"),
        (["ask", "--json"], "need a question"),
        (["ingest"], "paths"),
        (["chat"], "'blendrag ask' without a question"),
        (["bench", "sweep"], "'bench ttft --axis'"),
        # A blank name, as a variable that is not set leaves it, does not stand for the working folder.
        *((words, "no file or folder is named") for words in (
            ["ingest", "--index", "", "a.txt"], ["ask", "--index", "", "?"], ["serve", "--index", "", "m"],
            ["ingest", ""], ["ask", "?", "--html", ""], ["demo", "--folder", " "],
        )),
    ],
)  # fmt: skip
def test_wrong_usage_is_explained_with_code_2(
    blendrag: Blendrag, workdir: Path, arguments: list[str], hint: str
) -> None:
    (workdir / "a.txt").write_text("text")
    result = blendrag(*arguments)
    assert result.exit_code == 2 and hint in result.stderr and not result.stdout
    assert [path.name for path in workdir.iterdir()] == ["a.txt"]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["ask", "who?", "--ratio", "2"], "recompute_ratio must be between 0 and 1"),
        (["ask", "who?", "--selector", "hkdv"], "hkvd"),
        (["ingest", "[red]x[/red]"], "[red]x[/red]"),  # no markup
    ],
)
def test_wrong_value_is_named_in_a_line(blendrag: Blendrag, arguments: list[str], hint: str) -> None:
    result = blendrag(*arguments)
    assert result.exit_code == 1 and hint in complaint(result)


def test_unknown_setting_is_named(blendrag: Blendrag, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLENDRAG_SIMILARITY_TOPK", "3")
    result = blendrag("doctor")
    assert result.exit_code == 1 and "BLENDRAG_SIMILARITY_TOP_K" in complaint(result)


def test_wrong_path_is_corrected_and_makes_no_index(blendrag: Blendrag, workdir: Path) -> None:
    (workdir / "documents").mkdir()
    result = blendrag("ingest", "documnets")
    assert result.exit_code == 1 and "did you mean" in complaint(result) and "documents" in result.stderr
    assert not (workdir / "blendrag-index").exists()


def test_terminal_without_the_letters_of_a_text_shows_the_others(workdir: Path) -> None:
    code = "import sys; from blendrag.cli import main; sys.argv[0] = 'blendrag'; main()"
    done = ran("-c", code, "ingest", "./caf\u00e9 \U0001f6a2.md", PYTHONIOENCODING="ascii")
    assert done.returncode == 1 and done.stderr.startswith("error: no such file or folder: 'caf? ?.md'")


@pytest.mark.parametrize("stream", [1, 2])
@pytest.mark.parametrize("how", ["full", "closed"])
def test_output_that_nobody_can_read_is_no_traceback(stream: int, how: str, workdir: Path) -> None:
    shell = f'"$@" {stream}>{"/dev/full" if how == "full" else "&-"}'
    command = ["sh", "-c", shell, "sh", sys.executable, "-m", "blendrag", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    failed = (how, stream) == ("full", 1)
    assert done.returncode == failed
    assert done.stderr == ("error: [Errno 28] No space left on device\n" if failed else "")
    assert done.stdout == (f"blendrag {__version__}\n" if stream == 2 else "")


def test_conversation_ends_where_there_is_no_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    _converse(Mock(), show_thinking=False)


def test_name_that_is_too_long_is_one_line(workdir: Path) -> None:
    done = ran("-m", "blendrag", "gc", "--index", "x" * 5000)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "File name too long" in done.stderr


def test_what_was_printed_before_an_error_of_the_system_is_not_lost() -> None:
    code = (
        "from unittest.mock import patch; from blendrag.cli import app\n"
        "def failing(): print('half'); raise OSError('other')\n"
        "with patch.object(app, 'app', failing): app.main()"
    )
    done = ran("-c", code, PYTHONUNBUFFERED="")
    assert (done.returncode, done.stdout, done.stderr) == (1, "half\n", "error: other\n")


def test_every_path_that_a_command_takes_is_looked_at() -> None:
    for command in app.registered_commands:
        assert command.callback is not None
        for name, hint in get_type_hints(command.callback, include_extras=True).items():
            if "Path" in str(hint):
                assert get_args(hint)[1].parser is named_path, (command.callback, name)


@pytest.mark.parametrize(
    "arguments",
    [
        *(["ask", "who?"], ["ask"], ["stats"], ["stats", "--json"], ["stats", "--tree"]),
        *(["verify"], ["gc"], ["purge", "-d", "x"]),
    ],
)
def test_wrong_index_folder_is_corrected_and_not_made(
    blendrag: Blendrag, workdir: Path, arguments: list[str]
) -> None:
    (workdir / "my-index").mkdir()
    result = blendrag(*arguments, "--index", "my-indx")
    assert result.exit_code == 1 and "did you mean 'my-index'" in complaint(result) and not result.stdout
    assert [path.name for path in workdir.iterdir()] == ["my-index"]


def test_folder_without_an_index_is_not_offered_in_place_of_itself(blendrag: Blendrag, workdir: Path) -> None:
    (workdir / "kb").mkdir()
    assert complaint(blendrag("stats", "--index", "kb")).endswith("no index at 'kb': ingest something first")


@pytest.mark.parametrize("words", [["ask"], ["stats"], ["verify"], ["purge", "-d", "x"]])
def test_index_whose_kv_is_a_servers_is_told_from_none(
    blendrag: Blendrag, workdir: Path, words: list[str]
) -> None:
    (workdir / "kb").mkdir()
    with closing(Ledger(workdir / "kb")) as ledger:
        ledger.record(Document("text", "a"), ["k"], "served chunk_tokens=256")
        served = complaint(blendrag(*words, "--index", "kb"))
        ledger.record(Document("text", "a"), ["k"], "chunk_tokens=256")
    assert "the KV of index 'kb' is a server's: ask with --server" in served
    assert "no index at 'kb': ingest" in complaint(blendrag(*words, "--index", "kb")), "its catalogue is lost"


# -- with an index (its tokenizer and vector store, no engine) ------------------------------------------


def test_question_to_an_empty_index_starts_no_engine(blendrag: Blendrag, made: Path, model_dir: Path) -> None:
    for arguments in (["ask", "who?"], ["ask", "who?", "--json"], ["ask", "who?", "--explain"], ["ask"]):
        result = blendrag(*arguments, "--model", model_dir)
        assert result.exit_code == 1 and "holds no documents" in complaint(result) and not result.stdout


def test_documents_of_collections_are_shown_and_not_asked(
    blendrag: Blendrag, made: Path, model_dir: Path
) -> None:
    """They are a server's, or a vector store's: nothing here retrieves them."""
    with closing(Catalogue.open(made, None)) as catalogue:
        catalogue.register(owner_of("hr", "leave"), [("a" * 32, "text", [1, 2, 3])])
    assert "1 in collections" in blendrag("stats", "--model", model_dir).stdout
    assert "holds no documents" in complaint(blendrag("ask", "who?", "--model", model_dir))


def test_stats_as_json_are_json_only(blendrag: Blendrag, made: Path, model_dir: Path) -> None:
    result = blendrag("stats", "--json", "--model", model_dir)
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert facts["documents"] == 0 and facts["chunks"]["chunks"] == 0
    assert "documents" in blendrag("stats", "--model", model_dir).stdout


def test_model_folder_with_a_typo_is_corrected(blendrag: Blendrag, workdir: Path, made: Path) -> None:
    (workdir / "my-model").mkdir()
    result = blendrag("stats", "--model", "./my-modle")
    assert result.exit_code == 1 and "my-model" in complaint(result)


def test_answer_of_a_command_has_a_length_of_its_own_unless_a_setting_says_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (_length(None), _length(7)) == (1024, 7)
    monkeypatch.setenv("BLENDRAG_MAX_TOKENS", "33")
    assert (_length(None), _length(7)) == (33, 7)


# -- the demo's documents -------------------------------------------------------------------------------


def test_demo_reads_our_documentation_first_then_thirty_documents_or_more_and_not_minutes_of_them() -> None:
    documents = demo_documents()
    sources = [document.source for document in documents]
    ours = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
    assert sources[: len(ours)] == ours and all(document.text for document in documents)
    assert len(sources) - len(ours) >= 30 and len(set(sources)) == len(sources)
    assert sum(len(document.text) for document in documents) <= 200_000, "our own documentation counts"
    for name in ("typer", "rich", "pypdfium2", "pydantic", "safetensors", "transformers"):
        assert f"{name}, description" in sources, "the questions are about it"
    assert any(source.endswith("licence") for source in sources)
    assert demo_documents() == documents, "a second run goes on with them"


# -- what serve says before anything that takes long ----------------------------------------------------

ASKED = """
import io, json, sys
from contextlib import redirect_stderr
from blendrag.cli.app import main
told = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["blendrag", "serve", *words]
    with redirect_stderr(io.StringIO()) as said:
        try:
            main()
        except SystemExit as end:
            told.append([end.code, said.getvalue()])
print(json.dumps([told, sorted({"vllm", "torch", "transformers"} & sys.modules.keys())]))
"""


def test_what_is_wrong_is_one_line_before_an_engine_starts(tmp_path: Path, model_dir: Path) -> None:
    """model_dir: a model that is there."""
    model, index = str(model_dir), str(tmp_path / "kv")
    lock = IndexLock(Path(index), client=os.getpid())
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        cases = {
            (model, "--port", port): f"port {port}",
            (model, "--port", "0", "--host", "192.0.2.1"): "192.0.2.1",
            ("./nosuch", "--port", "0"): "nosuch",
            (model, "--port", "0", "--index", "/dev/null/kv"): "/dev/null/kv",
            (model, "--port", "0", "--index", index): f"open in process {os.getpid()}",
            ("--port", "0", "--cache-dir", "/dev/null/cache"): "BLENDRAG_CACHE_DIR",
        }
        done = subprocess.run(
            [sys.executable, "-c", ASKED, json.dumps([*cases])],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            timeout=240,
        )
    lock.release()
    assert done.returncode == 0, done.stderr
    told, imported = json.loads(done.stdout)
    for (code, said), expected in zip(told, cases.values(), strict=True):
        assert code == 1
        (line,) = (line for line in said.splitlines() if line.strip())
        assert expected in line
    assert imported == []
