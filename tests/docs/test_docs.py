"""What README and docs show works: code, commands, links, the table of settings."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from inspect import isclass
from pathlib import Path
from types import ModuleType
from typing import Any

import llama_index.core
import pytest
import typer
from llama_index.core import Settings as LlamaSettings
from llama_index.core.instrumentation import root_dispatcher
from typer.testing import CliRunner

import blendrag
import langchain_blendrag
import llama_index.llms.blendrag
from blendrag import errors
from blendrag.cli.app import app
from blendrag.engine.client.engine import Engine
from blendrag.options import DEFAULTS, STEPS, BlendOverrides
from blendrag.serving import lease
from blendrag.settings import Settings
from model_shapes import SHAPES
from models_page import rows
from one_engine import variables
from places import DOCS, EXAMPLES, ROOT

PACKAGES = sorted(ROOT.glob("integrations/*/README.md"))
README = ROOT / "README.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md")), *PACKAGES, EXAMPLES / "README.md"]
# Small and quick: that the examples work is tested here, not how well.
SMALL = {"similarity_top_k": 2, "max_tokens": 16}
INSTALLERS = (["pip", "install"], ["pip", "uninstall"], ["uv", "pip"])

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_ROW = re.compile(r"^\| `(\w+)` \| (.+?) \| (.+) \|$", re.MULTILINE)
_MACHINE_PATH = re.compile(r"(?<![\w.:/-])/(?:home|root|tmp|work|mnt|opt|usr|var|Users)/\S*|\b[A-Z]:\\")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    return [code for name, code in _BLOCK.findall(page.read_text()) if name == language]


def whole_lines(code: str) -> list[str]:
    return code.replace("\\\n", "").splitlines()


def command_lines(page: Path) -> list[str]:
    return [line for block in blocks(page, "sh") for line in whole_lines(block) if line]


def needs_engine(page: Path) -> bool:
    """A page's blocks are one program; it needs the engine if any of them asks an index or a model."""
    return any("index." in code or "llm." in code for code in blocks(page, "python"))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run(page: Path, *, commands: bool = False) -> None:
    """Run the page's blocks from top to bottom, as one program, in the current folder."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for language, code in _BLOCK.findall(page.read_text()):
        if language == "python":
            exec(compile(code, page.name, "exec", dont_inherit=True), namespace)
        elif language == "sh" and commands:
            for line in whole_lines(code):
                run_command(line)


def run_command(line: str) -> None:
    """Run a line that works on an index. Models other than the default would have to be downloaded."""
    on_index = line.startswith(("blendrag ingest", "blendrag ask", "blendrag stats"))
    if on_index and "--model" not in line:
        result = CliRunner().invoke(app, shlex.split(line)[1:], input="")
        assert result.exit_code == 0, f"{line}\n{result.output}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder but for ``docs``, with one page in it."""
    for name in [name for name in os.environ if name.startswith("BLENDRAG_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "quickstart.md", tmp_path / "docs")
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if not needs_engine(page)], ids=name_of)
def test_code_that_is_shown_runs(page: Path, folder: Path) -> None:
    run(page)


@pytest.mark.engine
@pytest.mark.parametrize("page", [page for page in PAGES if needs_engine(page)], ids=name_of)
def test_code_that_is_shown_runs_with_the_engine(
    page: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: Engine,
    engine_options: dict[str, Any],
) -> None:
    for name, value in variables({**engine_options, **SMALL}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(lease, "default_kv_dir", lambda settings: folder / "kv")  # not the user's
    monkeypatch.syspath_prepend(EXAMPLES)  # pages borrow the embeddings
    monkeypatch.setattr(root_dispatcher, "event_handlers", [])  # what a page sets in LlamaIndex ends with it
    monkeypatch.setattr(llama_index.core, "global_tokenizer", llama_index.core.global_tokenizer)
    for name, value in list(vars(LlamaSettings).items()):
        monkeypatch.setattr(LlamaSettings, name, value)
    run(page, commands=page.name == "quickstart.md")  # README shows the same commands


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_that_are_shown_have_the_options_that_exist(
    page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for line in command_lines(page):
        words = shlex.split(line.partition(" > ")[0], comments=True)
        with monkeypatch.context() as patch:
            while "=" in words[0]:
                patch.setenv(*words.pop(0).split("=", 1))
            Settings.load()  # refuses unknown BLENDRAG_ variables
        if words[0] == "make":
            assert f"\n{words[1]}:" in makefile, line
        elif words[0] == "blendrag":
            parse(words[1:])
        elif words[0] == "python":
            assert (ROOT / words[1]).is_file(), line
        elif words[0] == ".venv/bin/pytest":
            assert all((ROOT / word).exists() for word in words[1:] if "/" in word), line
        elif words[0] != "." and words[:2] not in INSTALLERS:
            pytest.fail(f"unknown command: {line}")


def parse(words: list[str]) -> None:
    """Have the command line take ``words`` apart, without doing anything. Raises a usage error."""
    command: Any = typer.main.get_command(app)
    while subcommands := getattr(command, "commands", None):
        command = subcommands[words.pop(0)]
    command.make_context(command.name, words)


def test_install_lines_name_the_versions_of_the_lock_file() -> None:
    lock = (ROOT / "requirements" / "cpu.lock").read_text().splitlines()
    for page in PAGES:
        for line in command_lines(page):
            for package in re.findall(r"[\w-]+==[\w.]+", line):
                assert package in lock, line


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(page.read_text()):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}"


def test_manual_has_every_page_and_leads_nowhere_else() -> None:
    """On a site, there is nothing but docs/."""
    site = (ROOT / "zensical.toml").read_text()
    assert sorted(re.findall(r'= "([\w-]+\.md)"', site)) == sorted(path.name for path in DOCS.glob("*.md"))
    for page in DOCS.glob("*.md"):
        assert not [link for link in _LINK.findall(page.read_text()) if link.startswith("..")], page.name


@pytest.mark.parametrize("module", [blendrag, langchain_blendrag, llama_index.llms.blendrag])
def test_every_public_name_is_in_the_reference(module: ModuleType) -> None:
    shown = re.findall(rf"^::: {module.__name__}\.(\w+)$", (DOCS / "reference.md").read_text(), re.MULTILINE)
    inherited = {"__version__", "BlendragError"}  # the latter is among the errors
    assert sorted(shown) == sorted(set(module.__all__) - inherited)


def test_readme_proves_by_tests_and_commands_that_there_are() -> None:
    proofs = re.findall(r"\| `((?:pytest|make|blendrag) [^`]+)` \|$", README.read_text(), re.MULTILINE)
    assert len(proofs) == 5
    for command, *words in map(shlex.split, proofs):
        if command == "blendrag":
            parse(words)
        elif command == "pytest":
            assert (ROOT / words[-1]).is_file()


def anchors(page: Path) -> Iterator[str]:
    for heading in _HEADING.findall(page.read_text()):
        yield re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_table_of_settings_is_the_settings() -> None:
    rows = _ROW.findall((ROOT / "docs" / "configuration.md").read_text())
    shown = [(name, default) for name, default, _ in rows]
    assert sorted(shown) == sorted((name, shown_default(name)) for name in Settings.model_fields)


def shown_default(name: str) -> str:
    if name == "cache_dir":  # depends on the user
        return "the user's cache folder"
    if name == "quality":
        usual = (DEFAULTS.selector, DEFAULTS.recompute_ratio)
        return f"`{next(quality for quality, step in STEPS.items() if step == usual)!r}`"
    if name in BlendOverrides.model_fields:
        return f"`{getattr(DEFAULTS, name)!r}`"
    return f"`{Settings.model_fields[name].default!r}`"


def test_table_of_models_is_what_make_nightly_checks() -> None:
    shown = rows()
    assert list(shown) == [shape.title for shape in SHAPES]
    for shape in SHAPES:
        served = ("exact prefixes, with states", shape.reason) if shape.reason else ("blended, layers",)
        assert any(each in shown[shape.title] for each in served)


def test_yaml_that_is_shown_is_accepted(folder: Path) -> None:
    for page in PAGES:
        for block in blocks(page, "yaml"):
            (folder / "blendrag.yaml").write_text(block)
            Settings.load()


def test_every_error_has_its_remedy() -> None:
    headings = _HEADING.findall((ROOT / "docs" / "troubleshooting.md").read_text())
    for name, error in vars(errors).items():
        if isclass(error) and issubclass(error, errors.BlendragError) and error is not errors.BlendragError:
            assert name in headings


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_machine_is_named(page: Path) -> None:
    assert not _MACHINE_PATH.findall(page.read_text())
