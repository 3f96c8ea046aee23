"""No engine process outlives the process that started it, however that one ends."""

from __future__ import annotations

import os
import signal
import threading
import time

_INTERVAL_S = 1.0


def exit_with_parent(pid: int) -> None:
    """Watch ``pid``, this process's parent, from a daemon thread; end this process when it is gone.

    vLLM's engine process only notices a client that closes its sockets; one that was killed leaves it
    waiting for ever, with its workers.
    """
    if os.getppid() != pid and not _alive(pid):
        os._exit(1)
    threading.Thread(target=_watch, args=(pid,), name="blendrag-watchdog", daemon=True).start()


def _watch(pid: int) -> None:
    is_child = os.getppid() == pid
    while os.getppid() == pid if is_child else _alive(pid):
        time.sleep(_INTERVAL_S)
    os.kill(os.getpid(), signal.SIGTERM)  # lets the workers end first
    time.sleep(5 * _INTERVAL_S)
    os._exit(1)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
