"""Processes for tests, forked from one that has imported PyTorch: to start Python anew takes seconds each."""

from __future__ import annotations

import os
import sys
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from places import ROOT

_FORKS = get_context("forkserver")
_FORKS.set_forkserver_preload(["stores"])


class Forked:
    """Runs ``script`` as ``python -c`` would, with blendrag and these helpers importable. Used as a Popen."""

    def __init__(self, script: str, *arguments: object) -> None:
        (its_in, to_in), (from_out, its_out), (from_err, its_err) = (
            _FORKS.Pipe(duplex=False) for _ in range(3)
        )
        _start_server()
        its_ends = (its_in, its_out, its_err)
        self._process = _FORKS.Process(target=_run, args=(script, list(map(str, arguments)), *its_ends))
        self._process.start()
        for end in its_ends:
            end.close()
        self.stdin, self.stdout, self.stderr = _file(to_in, "w"), _file(from_out), _file(from_err)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it printed, when it has ended; there is no more for it to read."""
        self.stdin.close()
        output, errors = self.stdout.read(), self.stderr.read()
        self._process.join(timeout)
        return output, errors

    def finished(self, timeout: float = 60) -> str:
        """What it printed, when it has ended without an error."""
        output, errors = self.communicate(timeout)
        assert self.returncode == 0, errors
        return output

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _start_server() -> None:
    """With the folders of :mod:`stores`, which Python 3.11 does not hand to it."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(Path(__file__).parent), before or ""])
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _file(end: Connection, mode: str = "r") -> IO[str]:
    with end:
        return os.fdopen(os.dup(end.fileno()), mode)


def _run(script: str, arguments: list[str], *ends: Connection) -> None:
    for number, end in enumerate(ends):
        os.dup2(end.fileno(), number)
        end.close()
    sys.argv = ["-c", *arguments]
    sys.stdin = os.fdopen(0, closefd=False)
    exec(compile(script, "<test>", "exec"), {"__name__": "__main__"})
