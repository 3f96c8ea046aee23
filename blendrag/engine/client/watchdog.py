"""No engine process outlives the process that started it, however that one ends.

Every engine process runs this module as its main module (``launch.main_not_imported_again``), before it
imports anything else. Without it, a process whose parent is killed while vLLM starts waits for ever, and so
does one whose client is killed later: vLLM only notices sockets that are closed.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
import time

_INTERVAL_S = 0.5
_GRACE_S = 3.0  # for workers and for what is being written
ENDS_WITHIN_S = 10.0
"""Of an engine's client's end, its processes are gone: a worker's parent is one that has a parent."""


@functools.cache  # once is enough
def exit_with_parent() -> None:
    """Watch the process that started this one, from a daemon thread; end this one when it is gone."""
    threading.Thread(target=_watch, name="blendrag-watchdog", daemon=True).start()


def _watch() -> None:
    while (parent := multiprocessing.parent_process()) is None:  # known a moment after the main module ran
        time.sleep(_INTERVAL_S / 10)
    while os.getppid() == parent.pid:
        time.sleep(_INTERVAL_S)
    os.kill(os.getpid(), signal.SIGTERM)  # lets the workers end first
    time.sleep(_GRACE_S)
    os._exit(1)


if __name__ == "__mp_main__":  # the main module of a process that multiprocessing has spawned
    exit_with_parent()
