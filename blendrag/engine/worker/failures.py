"""The log of blends that failed."""

from __future__ import annotations

import logging
import time

_EVERY_S = 60.0


class Failures:
    """A log of blends' errors, once per kind and minute. The request's own report has them in any case."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._logged: dict[str, float] = {}  # when, by kind

    def log(self, error: Exception) -> None:
        """Log the error with its traceback, unless one of its kind was a moment ago."""
        kind, now = f"{type(error).__name__}: {error}"[:80], time.monotonic()
        if self._logged.get(kind, -_EVERY_S) + _EVERY_S > now:
            return
        self._logged = {one: at for one, at in self._logged.items() if at + _EVERY_S > now} | {kind: now}
        self._log.error("a prompt is prefilled plainly, since its blend failed", exc_info=error)
