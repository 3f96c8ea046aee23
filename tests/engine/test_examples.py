"""The examples run as they are, answer, and reuse documents."""

from __future__ import annotations

import ast
import asyncio
import inspect
import io
import json
import re
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.instrumentation import get_dispatcher

from blendrag.engine.client.engine import Engine
from one_engine import variables
from places import EXAMPLES

HELPERS = ("langchain_embeddings", "llamaindex_embeddings")
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in HELPERS)
QUESTIONS = "When is the office in Bergen closed?\n\nHow many days of leave are there?\n"
_EVIDENCE = re.compile(
    r"^\[(\d+) documents reused: (\d+) tokens as they are, (\d+) recomputed, (\d+) read", re.M
)


@pytest.fixture
def one_engine(
    engine: Engine, engine_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """What is opened with no settings of its own uses the run's engine."""
    for name, value in variables({**engine_options, "max_tokens": 32}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(get_dispatcher(), "event_handlers", [])  # those that examples add end with them
    yield
    for helper in HELPERS:
        sys.modules.pop(helper, None)


@pytest.mark.engine
@pytest.mark.parametrize("script", SCRIPTS)
def test_example_that_is_shown_runs_and_reuses_documents(
    script: str, one_engine: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{script}.py"])
    monkeypatch.setattr(sys, "stdin", io.StringIO(QUESTIONS))
    runpy.run_path(str(EXAMPLES / f"{script}.py"), run_name="__main__")

    printed = capfd.readouterr().out
    evidence = list(_EVIDENCE.finditer(printed))
    assert evidence, printed
    documents, reused, recomputed, fresh = map(int, evidence[0].groups())
    assert documents == 2 and reused > 4 * recomputed > 0 and fresh < reused, printed
    assert all(len(answer.split()) > 3 for answer in _EVIDENCE.split(printed)[:-1:5]), printed


@pytest.mark.engine
def test_notebook_that_is_shown_runs_and_computes_once(
    one_engine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its cells are run as a kernel does it, within a running event loop; the costly one twice."""
    shutil.copytree(EXAMPLES / "handbook", tmp_path / "handbook")
    monkeypatch.chdir(tmp_path)
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    namespace: dict[str, Any] = {"__name__": "__main__"}

    async def run(cell: str) -> str:
        compiled = compile(cell, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        if inspect.iscoroutine(ran := eval(compiled, namespace)):
            await ran
        return capfd.readouterr().out

    async def run_all() -> dict[str, list[str]]:
        printed: dict[str, list[str]] = {}
        for cell in code:
            for _ in range(2 if "kb.ingest" in cell else 1):
                printed.setdefault(cell, []).append(await run(cell))
        return printed

    printed = asyncio.run(run_all())
    [ingests] = [texts for cell, texts in printed.items() if "kb.ingest" in cell]
    assert re.search(r"^[1-9]\d* chunks stored, 0 known, [1-9]\d* tokens prefilled", ingests[0]), ingests
    assert re.search(r"^0 chunks stored, [1-9]\d* known, 0 tokens prefilled", ingests[1]), ingests
    shown = "".join(text for texts in printed.values() for text in texts)
    assert len(re.findall(r"^cached ", shown, re.M)) == 2, shown
    assert all(any(texts) for cell, texts in printed.items() if "print(" in cell), shown


def test_table_names_every_example() -> None:
    table = (EXAMPLES / "README.md").read_text()
    for path in [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")]:
        assert f"]({path.name})" in table, path.name
