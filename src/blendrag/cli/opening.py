"""Opening an index for a command, and starting its engine."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blendrag.cli.console import err
from blendrag.index.progress import IngestProgress

if TYPE_CHECKING:
    from rich.status import Status

    from blendrag.index.index import BlendIndex


class StatusLine(IngestProgress):
    """Tells on standard error what is being waited for."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def note(self, message: str) -> None:
        self._status.update(message)


@contextmanager
def open_index(folder: Path, *, create: bool = False, **options: Any) -> Iterator[BlendIndex]:
    """The index in ``folder``. ``options``: settings, None where the user gave none."""
    with err().status("opening the index"):
        from blendrag.fuse import make_selector
        from blendrag.fuse.selector import SelectorOptions
        from blendrag.index.index import BlendIndex

        index = BlendIndex.open(folder, create=create, **options)
    try:
        make_selector(index.settings.selector, SelectorOptions())  # a typo is an error, not a slow answer
        yield index
    finally:
        index.close()


def start_engine(index: BlendIndex) -> None:
    """Start the index's engine so that Ctrl-C reaches this process only.

    A terminal interrupts every process in the foreground, and the engine's would end with the first answer
    that is stopped. A signal mask passes to child processes, so the thread that starts them blocks it.
    """
    from blendrag.engine.launch import engine_environment

    with engine_environment(index.settings):
        resource_tracker.ensure_running()  # started later, it would unblock the signal again
    failed: list[BaseException] = []

    def start() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            index.start(StatusLine(status))
        except BaseException as error:
            failed.append(error)

    with err().status("starting the engine") as status:
        thread = threading.Thread(target=start, name="blendrag-start", daemon=True)
        thread.start()
        thread.join()
    if failed:
        raise failed[0]
