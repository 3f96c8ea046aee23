"""An index whose engine does not hear Ctrl-C.

A terminal interrupts every process in the foreground. vLLM's would stop serving, so that neither what was
computed could be kept nor a next question answered. Ctrl-C is for this process, which tells the engine.
"""

from __future__ import annotations

import signal
import threading
from multiprocessing import resource_tracker

from blendrag.engine.handle import Engine
from blendrag.engine.launch import engine_environment
from blendrag.index.index import BlendIndex
from blendrag.index.progress import IngestProgress


class UndisturbedIndex(BlendIndex):
    """A signal mask passes on to child processes: a thread that blocks the signal starts them."""

    def start(self, progress: IngestProgress | None = None) -> Engine:
        if self._engine is not None:
            return self._engine
        with engine_environment(self.settings):
            resource_tracker.ensure_running()  # started later, it would unblock the signal again
        outcome: list[Engine | BaseException] = []

        def start() -> None:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                outcome.append(super(UndisturbedIndex, self).start(progress))
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=start, name="blendrag-start", daemon=True)
        thread.start()
        thread.join()
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]
