"""Opening an index for a command, and starting its engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blendrag.cli.console import err
from blendrag.errors import needs
from blendrag.progress import Notes

if TYPE_CHECKING:
    from blendrag.index.answering import Answering
    from blendrag.index.index import BlendIndex
    from blendrag.index.served import ServedIndex


@contextmanager
def open_index(folder: Path, *, create: bool = False, **options: Any) -> Iterator[BlendIndex]:
    """Open the index in ``folder``. ``options``: settings, None where the user gave none."""
    with err().status("opening the index"):
        from blendrag.index.index import BlendIndex

        index = BlendIndex.open(folder, create=create, **options)
    with closing(index):
        yield index


@contextmanager
def open_served(
    folder: Path, servers: Sequence[str], api_key: str | None, *, create: bool = False, **options: Any
) -> Iterator[ServedIndex]:
    """Open the index in ``folder`` with KV and answers of servers."""
    with err().status("opening the index"):
        with needs("blendrag[index]"):
            from blendrag.index.served import ServedIndex
        from blendrag.remote.chat import RemoteChat

        chats = [RemoteChat(url, api_key, **options) for url in servers]
        index = ServedIndex(folder, chats, create=create)
    with closing(index):
        yield index


def start_engine(index: Answering) -> None:
    """Start the index's engine, if it has one, and say so: it takes a while."""
    from blendrag.index.index import BlendIndex

    if not isinstance(index, BlendIndex):
        return
    with err().status("starting the engine") as status:
        index.start(Notes(status.update))
