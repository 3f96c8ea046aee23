"""No engine process outlives the process that started it, however that one ends.

Every engine process runs this module as its main module (``launch.spawning``), before it imports anything
that takes long; those of a server begin it as a plugin (``server/plugin.py``). Without it, a process whose
parent is killed while vLLM starts waits for ever, and so does one whose client is killed later: vLLM only
notices sockets that are closed.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
import time
from typing import Any

from blendrag.engine.client import engine_log

_INTERVAL_S = 0.25
_GRACE_S = 2.5  # for workers and for what is being written
ENDS_WITHIN_S = 10.0
"""The seconds after a client's end within which all its engine's processes are gone: a worker's parent is an
engine process, which has a parent itself."""


@functools.cache  # one thread is enough
def exit_with_parent(*, of_server: bool = False) -> None:
    """Watch the process that started this one, from a daemon thread, and end this process when that one is
    gone. of_server: also end the processes that it had started before, which may have no watchdog: vLLM's
    coordinator of data parallel engines."""
    threading.Thread(target=_watch, args=(of_server,), name="blendrag-watchdog", daemon=True).start()


def _watch(of_server: bool) -> None:
    while (parent := multiprocessing.parent_process()) is None:  # known a moment after the main module ran
        time.sleep(_INTERVAL_S / 10)
    siblings = _children(parent.pid) if of_server else []
    while os.getppid() == parent.pid:
        time.sleep(_INTERVAL_S)
    for process in siblings:
        with contextlib.suppress(Exception):  # it has ended, or its number is another's now
            process.terminate()
    os.kill(os.getpid(), signal.SIGTERM)  # lets the workers end first
    time.sleep(_GRACE_S)
    os._exit(1)


def _children(pid: int | None) -> list[Any]:
    import psutil  # type: ignore[import-untyped]  # comes with vLLM

    with contextlib.suppress(psutil.Error):
        return [child for child in psutil.Process(pid).children() if child.pid != os.getpid()]
    return []


if __name__ == "__mp_main__":  # the main module of a process that multiprocessing has spawned
    engine_log.print_there()
    exit_with_parent()
