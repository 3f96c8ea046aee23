"""What a disk answers, in our words."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from blendrag.errors import StoreError, StoreFullError


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Raises StoreFullError or StoreError, "what: reason", for an OSError inside."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise (StoreFullError if full else StoreError)(f"{what}: {error.strerror or error}") from error
