"""The consequences of blends that failed: a traceback in the log, and a limit where memory did not
suffice."""

from __future__ import annotations

import logging
import time

_EVERY_S = 60.0
_REMEMBERED_S = 300.0


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


class MemoryLimit:
    """A limit on the length of prompts that are blended, since one ran out of memory lately, after most of
    the work."""

    def __init__(self) -> None:
        self._tokens, self._until = 0, 0.0

    def ran_out(self, tokens: int) -> None:
        """Note that a prompt of so many tokens ran out of memory."""
        now = time.monotonic()
        self._tokens = min(tokens, self._tokens) if now < self._until else tokens
        self._until = now + _REMEMBERED_S

    def suffices(self, tokens: int) -> bool:
        """Return whether nothing is known against blending a prompt of so many tokens."""
        return tokens < self._tokens or time.monotonic() >= self._until
