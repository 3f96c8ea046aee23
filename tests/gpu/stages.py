"""`make gpu`: tests on a GPU, in stages, each within its minutes and each repeatable alone.

    python tests/gpu/stages.py [STAGE]

A stage is a selection of tests. The tables that they make are left in OUT/<stage>.md, and printed when the
stage ends; benches leave their numbers in OUT/<stage>.jsonl, too. A stage that fails or takes too long does
not keep the next one from running. Exit code: 0, 1 if a stage failed, 2 if none can run here.

    OUT     gpu-results by default
    MODEL   the folder of a model to measure with, instead of random weights in the shapes of two
"""

from __future__ import annotations

import argparse
import difflib
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
# The options of pyproject.toml are for plugins that only our own environment is sure to have.
PYTEST = ("-m", "pytest", "-q", "-ra", "-o", "addopts=--import-mode=importlib --strict-markers")
OF_TENSORS = ("attention", "load", "store/test_codecs.py")


@dataclass(frozen=True, slots=True)
class Stage:
    """minutes: it is ended after so many. tests: under tests/. model: what is measured with."""

    minutes: int
    tests: tuple[str, ...]
    model: str = ""


def stages(model: str) -> dict[str, Stage]:
    """By name, in their order: at most 9 minutes each, 28 in all."""
    bench = ("gpu/test_bench.py",)
    shapes = {"llama": Stage(6, bench, "llama"), "mistral": Stage(6, bench, "mistral")}
    return {
        "tensors": Stage(4, (*(f"unit/{name}" for name in OF_TENSORS), "gpu/test_tensors.py")),
        "doctor": Stage(6, ("gpu/test_doctor.py",)),
        **({"model": Stage(9, bench, model)} if model else shapes),
        "faults": Stage(3, ("gpu/test_faults.py",)),
        "budget": Stage(3, ("gpu/test_budget.py",)),
    }


def refusal(name: str | None, model: str) -> str | None:
    """Why there is nothing to run, in a line."""
    known = stages(model)
    if name is not None and name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        guess = f"; did you mean {close[0]}?" if close else ""
        return f"no stage {name!r}; there are {', '.join(known)}{guess}"
    if model and not (Path(model) / "config.json").is_file():
        return f"MODEL={model} is not the folder of a model"
    try:
        import torch

        from blendrag.machine import idle_gpu
    except ImportError as error:
        return f"{error} in {sys.executable}: docs/gpu.md says what to install"
    if reason := idle_gpu():
        return f"{reason} (docs/gpu.md)"
    return None if torch.cuda.is_available() else "there is no GPU here"


def run(name: str, stage: Stage, out: Path) -> bool:
    """Whether all of its tests passed in time."""
    tables = out / f"{name}.md"
    tables.write_text("")
    tables.with_suffix(".jsonl").unlink(missing_ok=True)
    environment = os.environ | {"GPU_TABLES": str(tables), "GPU_MODEL": stage.model}
    command = [sys.executable, *PYTEST, *(f"tests/{test}" for test in stage.tests)]
    print(f"== {name}, {stage.minutes} minutes at most", flush=True)
    begin = time.monotonic()
    # One that is cut off leaves gigabytes, and engines that end a moment later.
    with TemporaryDirectory(prefix="blendrag-gpu-", ignore_cleanup_errors=True) as folder:
        environment["TMPDIR"] = folder
        try:
            code = subprocess.run(command, cwd=ROOT, env=environment, timeout=60 * stage.minutes).returncode
            verdict = "passed" if code == 0 else "FAILED"
        except subprocess.TimeoutExpired:
            verdict = "FAILED: it took too long"
    print(tables.read_text(encoding="utf-8"))
    print(f"== {name}: {verdict}, {time.monotonic() - begin:.0f} s", flush=True)
    return verdict == "passed"


def main() -> int:
    arguments = argparse.ArgumentParser(usage=__doc__)
    arguments.add_argument("stage", nargs="?")
    arguments.add_argument("--check", action="store_true")
    given = arguments.parse_args()
    model = os.environ.get("MODEL", "")
    if reason := refusal(given.stage, model):
        print(reason)
        return 2
    if given.check:
        return 0
    out = Path(os.environ.get("OUT") or "gpu-results").absolute()
    out.mkdir(parents=True, exist_ok=True)
    chosen = {name: stage for name, stage in stages(model).items() if given.stage in (None, name)}
    results = [run(name, stage, out) for name, stage in chosen.items()]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
